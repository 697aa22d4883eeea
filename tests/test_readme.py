"""The README is true: its example gives its answer, its table is the measured one, the files and options that it names exist."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import RunningService

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def block(marker: str) -> str:
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, marker
    return found[1]


def same(left: Any, right: Any) -> bool:
    """Equal, but for the last digits of probabilities, which differ between processors."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, int | float) and not isinstance(left, bool):
        return bool(left == pytest.approx(right, rel=1e-4, abs=1e-4))
    return bool(left == right)


def test_the_example_gives_the_answer(service: RunningService) -> None:
    command = block("example: request")
    assert "-H 'Content-Type: application/json'" in command
    body = re.search(r"-d '(.*?)'", command, re.DOTALL)
    assert body
    answer = httpx.post(f"{service.url}/v1/predict", content=body[1], headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    shown, given = json.loads(block("example: answer")), answer.json()
    assert shown.pop("prediction_id") != given.pop("prediction_id"), "an id is never the same twice"
    assert same(shown, given)


def test_the_table_is_the_measured_one() -> None:
    report = (ROOT / "docs/evaluation/published_mlp_a100/evaluation.md").read_text("utf-8")
    table = "\n".join(line for line in report.splitlines() if line.startswith("|"))
    assert table in README


def test_the_shipped_card_carries_the_table() -> None:
    card = json.loads((ROOT / "gpumemnet/bundles/mlp-a100-published/card.json").read_text("utf-8"))
    evaluation = json.loads((ROOT / "docs/evaluation/published_mlp_a100/evaluation.json").read_text("utf-8"))
    assert card["metrics"] == evaluation["candidates"]
    assert card["training_data"]["sha256"] == evaluation["data_sha256"]


FOLDERS = "gpumemnet|dataset_builder|models|service|examples|docs|deploy|integrations|benchmarks"
NAMED_PATHS = sorted(set(re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", README)))


@pytest.mark.parametrize("path", NAMED_PATHS)
def test_named_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_make_knows_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
