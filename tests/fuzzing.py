"""What the fuzz tests share: how many cases they run, and how a valid document or a valid file is
spoilt.

``GPUMEMNET_FUZZ_CASES`` says how many cases each test runs; a hundred unless set, so that an
ordinary run stays short.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("GPUMEMNET_FUZZ_CASES", "100"))

fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)

numbers = (
    st.integers(-2, 2)
    | st.sampled_from(
        [2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1, 10**400]
    )
    | st.floats()
    | st.sampled_from([1e308, -1e308, 5e-324, -0.0, 0.5, 1.0])
)
texts = (
    st.text(
        st.characters(exclude_categories=[]), max_size=12
    )  # lone surrogates and control characters included
    | st.sampled_from(
        [
            "",
            "\x00",
            "\ud800",
            "\ufeff",
            "None",
            "nan",
            "1",
            "{}",
            "😀" * 3,
            "a" * 5000,
            "../../etc/passwd",
            "%s%n",
        ]
    )
)
junk = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in ``document`` with each of its keys."""
    if isinstance(document, dict | list):
        for key in list(document) if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from _places(document[key])


@st.composite
def spoilt_documents(draw: st.DrawFn, documents: Sequence[Any]) -> Any:
    """One of ``documents`` with up to three of its values, members or elements changed, lost,
    doubled or moved."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(document))
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        action = draw(
            st.sampled_from(
                ["replace", "replace", "type", "lose", "double", "add", "move", "deepen"]
            )
        )
        if action == "replace":
            container[key] = draw(junk)
        elif action == "type":
            value = container[key]
            container[key] = draw(
                st.sampled_from([str(value), [value], {"value": value}, not value, None])
            )
        elif action == "lose":
            del container[key]
        elif action == "double" and isinstance(container, list):
            container[key:key] = [container[key]] * draw(st.sampled_from([1, 2, 300]))
        elif action == "add" and isinstance(container, dict):
            container[draw(texts)] = draw(junk)
        elif action == "move":
            other, there = places[draw(st.integers(0, len(places) - 1))]
            container[key] = copy.deepcopy(other[there]) if other is not container[key] else None
        else:
            for _ in range(draw(st.sampled_from([1, 3, 90]))):
                container[key] = [container[key]]
    return document


@st.composite
def spoilt_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with some of its bytes changed, lost, doubled or added."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.sampled_from([0, 1, 1, 2, 8, 100]))
        added = draw(
            st.binary(max_size=4)
            | st.just(content[at : at + length] * 2)
            | st.sampled_from(
                [
                    b"",
                    b"\xff",
                    b"\xc0\x80",
                    b"\xed\xa0\x80",
                    b"\x00",
                    b'"',
                    b"\\",
                    b"[" * 3,
                    b"}",
                    b"NaN",
                    b"-",
                    b"e999",
                ]
            )
        )
        content = content[:at] + added + content[at + length :]
    return content


@st.composite
def spoilt_json(draw: st.DrawFn, documents: Sequence[Any]) -> bytes:
    """JSON text of a spoilt document, as text or in its bytes spoilt once more."""
    text = json.dumps(draw(spoilt_documents(documents)), ensure_ascii=draw(st.booleans()))
    content = text.encode("utf-8", "surrogatepass")
    way = draw(
        st.sampled_from(
            ["text"] * 4 + ["bytes"] * 3 + ["twice", "digits", "nesting", "encoding", "constant"]
        )
    )
    if way == "bytes":
        content = draw(spoilt_bytes(content))
    elif way == "twice":
        names = [b'"job"', b'"family"', b'"kind"', b'"coverage"', b'"inputs"', b'"name"', b'""']
        content = content.replace(
            b"{", b"{" + draw(st.sampled_from(names)) + b": 1, ", draw(st.integers(1, 4))
        )
    elif way == "digits":
        content = content.replace(
            b": 1", b": " + b"1" * draw(st.sampled_from([30, 400, 5000, 20_000]))
        )
    elif way == "nesting":
        depth = draw(st.sampled_from([50, 1000, 20_000]))
        content = content.replace(
            b": 1", b": " + draw(st.sampled_from([b"[", b'{"a":'])) * depth, 1
        )
    elif way == "encoding":
        content = text.encode(
            draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "utf-7"])), "surrogatepass"
        )
    elif way == "constant":
        content = content.replace(
            b": 1",
            b": "
            + draw(st.sampled_from([b"NaN", b"-Infinity", b"Infinity", b"nan", b"1_0", b"0x1"])),
        )
    return content
