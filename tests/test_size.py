"""The budget of the project's size, in ``size_budget.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.interface_counts import counts
from tests.size import size

BUDGET = tomllib.loads((Path(__file__).parent / "size_budget.toml").read_text("utf-8"))


def test_the_code_is_within_its_budget() -> None:
    measured = size()
    for room, most in BUDGET["files"].items():
        assert measured.files[room] <= most, f"{room} has {measured.files[room]} files"
    for room, most in BUDGET["tokens"].items():
        assert measured.tokens[room] <= most, f"{room} has {measured.tokens[room]:,} tokens"


def test_what_users_must_know_is_within_its_budget() -> None:
    found = counts()
    over = {name: found[name] for name, most in BUDGET["interface"].items() if found[name] > most}
    assert not over
