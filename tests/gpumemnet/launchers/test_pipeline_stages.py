"""Stages of a pipeline, each rank by itself, against counts of microbatches in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing import trace_script
from gpumemnet.tracing.result import answer_from_dict, answer_to_dict
from tests.nightly import nightly

SCRIPT = Path(__file__).with_name("pipeline.py")
ROWS_BYTES = 4 * 512 * 256
"""Of one microbatch between two stages."""


@pytest.mark.parametrize(("stages", "in_flight"), [(2, 8), *nightly([(1, 5)])])
def test_the_first_rank_holds_most_microbatches(stages: int, in_flight: int) -> None:
    answer = trace_script(Launch(str(SCRIPT), arguments=(str(stages),), ranks=3))
    assert [each.rank for each in answer.by_rank] == [0, 1, 2]
    received = 8 + 16 * (stages - 1)  # buffers for all microbatches: hidden states and gradients
    held = answer.parts["saved_activation"] / ROWS_BYTES - received
    assert in_flight * 9 <= held < (in_flight + 2) * 9  # output, activation, and its input
    assert answer_from_dict(answer_to_dict(answer)) == answer
