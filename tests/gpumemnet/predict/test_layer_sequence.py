"""The layer sequence: padding, mask, columns, and jobs without layers."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.features import SEQUENCE_COLUMNS, layer_sequence
from tests.jobs import jobs, small_job


@given(st.lists(jobs(), min_size=1, max_size=5))
def test_every_layer_is_one_row_and_the_rest_is_padding(many: list[TrainingJob]) -> None:
    assume(all(job.layers for job in many))
    sequences, mask = layer_sequence(JobTable.from_jobs(many))
    assert sequences.shape == (
        len(many),
        max(len(job.layers) for job in many),
        len(SEQUENCE_COLUMNS),
    )
    assert not sequences[~mask].any()
    for row, job in enumerate(many):
        assert mask[row].sum() == len(job.layers)
        for position, layer in enumerate(job.layers):
            assert sequences[row, position, GROUP_NAMES.index(layer.group)] == 1
            assert sequences[row, position, : len(GROUP_NAMES)].sum() == 1


def test_bytes_are_those_of_a_sample_and_the_precision() -> None:
    job = small_job(precision="amp_bf16")
    sequences, _ = layer_sequence(JobTable.from_jobs([job]))
    assert np.expm1(sequences[0, 0, -2]) == pytest.approx(512 * 2, rel=1e-5)
    assert np.expm1(sequences[0, 0, -1]) == pytest.approx(51_712 * 4, rel=1e-5)


def test_totals_alone_are_refused() -> None:
    with pytest.raises(InvalidJobError, match="layers: is empty"):
        layer_sequence(
            JobTable.from_jobs(
                [small_job(), small_job(layers=(), total_activations=1, total_parameters=1)]
            )
        )
