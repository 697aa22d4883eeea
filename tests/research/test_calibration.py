"""Calibration of the safe bytes of traces: whole families are held out."""

import pytest

from gpumemnet.tracing.timeline import FROZEN, OTHERS
from research.calibration import Run, held_out, margins
from research.readings import Reading


def run(family: str, read_bytes: float, kind: str = FROZEN) -> Run:
    return Run("job", "GPU", family, kind, ["cause"], read_bytes, 110.0, 100.0)


def test_no_family_sets_the_margin_that_it_is_judged_by() -> None:
    many = [run("many", 110.0 + each / 100, OTHERS) for each in range(200)]
    every = [*many, run("a", 112.0), run("a", 109.0), run("b", 120.0)]
    assert margins(every) == {  # 99 % of the many; of few, the largest
        "convolutions": 0.0198,
        "frozen": 0.1,
        "others": 0.0198,
        "ranks": 0.0198,
    }
    bounds = {(one.family, one.read_bytes): bound for one, bound in held_out(every)}
    assert bounds["a", 112.0] == pytest.approx(120.0)
    assert bounds["b", 120.0] == pytest.approx(112.0)  # above the margin of the others


def test_no_family_sets_the_factor_of_names_that_its_bases_of_4_bits_have() -> None:
    named = [
        Reading("source", family, "plain", read, 100.0, {}, "A100", family, [], 0)
        for family, read in (("a", 150.0), ("b", 105.0))
    ]
    ((_, bound),) = held_out([run("a", 112.0, "")], named)
    assert bound == pytest.approx(110.0 + 100.0 * 0.103)  # 1.05, and as much for a new source
