"""Calibration of the safe bytes of traces: whole families are held out."""

import pytest

from gpumemnet.tracing.timeline import FROZEN, OTHERS
from research.calibration import Run, held_out, margins


def run(family: str, read_bytes: float, kind: str = FROZEN) -> Run:
    return Run("job", "GPU", family, kind, ["cause"], read_bytes, 110.0, 100.0)


def test_no_family_sets_the_margin_that_it_is_judged_by() -> None:
    every = [run("a", 112.0), run("a", 109.0), run("b", 120.0), run("c", 111.0, OTHERS)]
    assert margins(every) == {"convolutions": 0.1, "frozen": 0.1, "others": 0.01, "ranks": 0.1}
    bounds = {(one.family, one.read_bytes): bound for one, bound in held_out(every)}
    assert bounds["a", 112.0] == pytest.approx(120.0)
    assert bounds["b", 120.0] == pytest.approx(112.0)  # above the margin of the others
    assert bounds["c", 111.0] == pytest.approx(120.0)  # no other of its kind: the widest
