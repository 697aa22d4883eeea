"""The examples of the README and the guides give their answers; ``tests/docs`` checks everything
else in the documents."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import RunningService

ROOT = Path(__file__).parents[1]


def block(page: str, marker: str) -> str:
    found = re.search(
        rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```",
        (ROOT / page).read_text("utf-8"),
        re.DOTALL,
    )
    assert found, marker
    return found[1]


def ask(service: RunningService, command: str) -> httpx.Response:
    """Send what a ``curl`` command of a document would send."""
    path = re.search(r"http://127\.0\.0\.1:8000(/[^\s']*)", command)
    body = re.search(r"-d '(.*?)'", command, re.DOTALL)
    assert path
    assert body
    headers = dict(header.split(": ", 1) for header in re.findall(r"-H '(.*?)'", command))
    return httpx.post(service.url + path[1], content=body[1], headers=headers)


def same(left: Any, right: Any) -> bool:
    """Equal, but for the last digits of probabilities, which differ between processors; ``left``
    may leave fields out."""
    if isinstance(left, dict):
        return left.keys() <= right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, int | float) and not isinstance(left, bool):
        return bool(left == pytest.approx(right, rel=1e-4, abs=1e-4))
    return bool(left == right)


@pytest.mark.parametrize(
    ("page", "prefix"), [("README.md", "example"), ("docs/how-to/scheduler.md", "example: plain")]
)
def test_the_example_in_text_gives_the_answer(
    service: RunningService, page: str, prefix: str
) -> None:
    separator = " " if ":" in prefix else ": "
    answer = ask(service, block(page, f"{prefix}{separator}request"))
    assert answer.status_code == 200
    assert answer.text.strip() == block(page, f"{prefix}{separator}answer").strip()


def test_the_example_in_json_gives_the_answer(service: RunningService) -> None:
    answer = ask(service, block("docs/quickstart.md", "example: request"))
    assert answer.status_code == 200
    shown, given = json.loads(block("docs/quickstart.md", "example: answer")), answer.json()
    assert shown.pop("prediction_id") != given.pop("prediction_id"), "an id is never the same twice"
    assert same(shown, given)
