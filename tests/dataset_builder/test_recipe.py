"""Recipes: what users may write, and the sentence they get for what they may not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.recipe import Choices, Range, Recipe, load_recipe
from gpumemnet.errors import GpumemnetError, InvalidRequestError
from gpumemnet.units import GIB, MIB

SHIPPED = Path(__file__).parents[2] / "dataset_builder" / "recipes" / "mlp.yaml"


def changed(folder: Path, path: str, value: object) -> str:
    """The shipped recipe with one value replaced (or removed, when it is ``...``), as a file."""
    document = yaml.safe_load(SHIPPED.read_text())
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    if value is ...:
        del place[last]
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(document))
    return str(file)


@pytest.mark.parametrize(
    ("path", "value", "field", "sentence"),
    [
        ("features.widht", 3, "features.widht", "did you mean 'width'"),
        ("features.width", {"from": 100, "to": 10}, "features.width", "from the smaller number"),
        ("features.width", {"from": 4, "to": 99999}, "features.width.to", "between 4 and 16384"),
        ("features.width", {"from": 4.5, "to": 64}, "features.width.from", "whole number"),
        ("features.width", [], "features.width", "at least one value"),
        (
            "features.width",
            "wide",
            "features.width",
            "a whole number between 4 and 16384, not 'wide'",
        ),
        ("features.width", ..., "features.width", "is missing"),
        ("features.activation", {"from": 1, "to": 2}, "features.activation.from", "one of"),
        (
            "features.activation",
            ["relu", "relux"],
            "features.activation",
            "must be one of identity",
        ),
        ("features.activation", {"choices": {"relu": -1}}, "features.activation", "zero or more"),
        ("options.channels_last", 1, "options.channels_last", "true or false"),
        ("memory.from", "lots", "memory.from", "such as '0.5 GiB'"),
        ("family", "rnn", "family", "must be one of mlp"),
        ("name", "No Name", "name", "lower-case"),
    ],
)
def test_the_invalid_field_is_named(
    tmp_path: Path, path: str, value: object, field: str, sentence: str
) -> None:
    with pytest.raises(InvalidRequestError, match=sentence) as caught:
        load_recipe(changed(tmp_path, path, value))
    assert caught.value.field.endswith(f"mine.yaml: {field}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{", "a: [1", "5", "", "[]", "\x00", "a: &a [*a]", "!!python/object:os.system {}"]
)
def test_text_that_is_no_recipe(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(InvalidRequestError):
        load_recipe(str(tmp_path / "r.yaml"))


def test_a_missing_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"shipped are .*mlp"):
        load_recipe("nothing")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["from", "to", "scale", "choices", "x"]), children, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(max_examples=80)
@given(
    value=json_values,
    path=st.sampled_from(
        ["features.width", "features.norm", "options.cudnn_benchmark", "memory", "work"]
    ),
)
def test_any_value_gives_a_recipe_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, value: object, path: str
) -> None:
    with contextlib.suppress(GpumemnetError):
        assert isinstance(load_recipe(changed(tmp_path_factory.mktemp("r"), path, value)), Recipe)


@pytest.mark.parametrize("log", [True, False])
def test_a_range_reaches_both_ends_and_stays_inside(log: bool) -> None:
    numbers = [Range(1, 8, log, True).value(position / 1000) for position in range(1000)]
    assert sorted(set(numbers)) == list(range(1, 9))
    assert Range(0.1, 0.5, log, False).value(0.0) == pytest.approx(0.1)
    assert Range(5, 5, log, True).value(0.999) == 5


def test_choices_follow_their_weights(tmp_path: Path) -> None:
    recipe = load_recipe(
        changed(tmp_path, "features.norm", {"choices": {"none": 3, "layer_norm": 1}})
    )
    norm = recipe.features["norm"]
    assert isinstance(norm, Choices)
    assert [norm.value(position / 100) for position in range(100)].count("none") == 75


def test_memory_is_bytes_or_a_share_of_the_card(tmp_path: Path) -> None:
    recipe = load_recipe(changed(tmp_path, "memory", {"from": "512 MiB", "to": "50 %"}))
    assert recipe.memory_from(80 * GIB) == 512 * MIB
    assert recipe.memory_to(80 * GIB) == 40 * GIB
