"""The largest batch and the smallest GPU: right, and monotone whatever the predictor says."""

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import MAX_BATCH_SIZE, TrainingJob
from gpumemnet.predict.distribution import BinScheme, MemoryDistribution
from gpumemnet.predict.gpu_fit import Target, target
from gpumemnet.predict.largest_batch import batch_grid, batch_sizes
from gpumemnet.predict.prediction import (
    PredictingModel,
    PredictionOptions,
    PredictionTable,
)
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB, ceil_mib
from tests.jobs import small_job
from tests.registries import shipped


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.default()


def device(free_mib: int) -> Target:
    return target("A100", free_mib=free_mib, device="x")


OF_SHIPPED = Predictor([shipped()])


class Erratic:
    """A predictor whose memory goes up and down with the batch, and which now and then knows no
    limit."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.prediction_gpu = OF_SHIPPED.prediction_gpu

    def predict_table(
        self, jobs: JobTable, options: PredictionOptions | None = None, **keywords: Any
    ) -> PredictionTable:
        options = options or PredictionOptions(**keywords)
        bins, gpu, coverage = options.bins or BinScheme(MIB, 2), options.gpu, options.coverage
        expected: list[int] = []
        safe: list[int] = []
        reasons: dict[int, tuple[str, ...]] = {}
        for row, job in enumerate(jobs):
            noise = np.random.default_rng((self._seed, job.batch_size, len(gpu or "")))
            expected.append(round(noise.uniform(1.0, 8.0) * 100 * MIB * job.batch_size**0.5))
            if noise.uniform() >= 0.7:
                reasons[row] = ("erratic",)
            safe.append(round(expected[-1] * noise.uniform(1.0, 4.0)))
        model = PredictingModel("erratic", "1", "traced", self.prediction_gpu(gpu), bins)
        even = MemoryDistribution(*np.ones((3, len(jobs), 1)))
        has_none = [row in reasons for row in range(len(jobs))]
        return PredictionTable(
            model,
            np.array(expected),
            np.ma.MaskedArray(safe, mask=has_none),
            reasons,
            coverage,
            even,
            bins.log_inner_edges,
            np.zeros(len(jobs), np.bool_),
        )


def erratic(seed: int) -> Predictor:
    return cast(Predictor, Erratic(seed))


def never_falls(values: Iterable[int | None]) -> bool:
    known = [value for value in values if value is not None]
    return known == sorted(known)


CONVOLUTIONS = (
    Layer("conv2d", 802_816, 9408),
    Layer("batch_norm2d", 802_816, 128),
    Layer("relu", 802_816),
)


def cnn(batch_size: int = 64, **changes: Any) -> TrainingJob:
    """A CNN like those that the models were trained on."""
    layers = (*CONVOLUTIONS, Layer("adaptive_avg_pool", 64), Layer("linear", 1000, 65_000))
    return small_job(
        family="cnn", input_elements=150_528, layers=layers, batch_size=batch_size, **changes
    )


amounts = st.lists(st.integers(1, 200_000), min_size=2, max_size=8).map(sorted)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), memories=amounts, max_batch=st.integers(1, 3000))
def test_more_memory_never_gives_a_smaller_batch(
    seed: int, memories: list[int], max_batch: int
) -> None:
    found = [
        batch_sizes(erratic(seed), small_job(), device(memory), max_batch=max_batch)
        for memory in memories
    ]
    assert never_falls([sizes.safe_batch or 0 for sizes in found])
    assert never_falls([sizes.likely_batch or 0 for sizes in found])
    for sizes in found:
        assert sizes.curve == found[0].curve
        assert never_falls([point.request_mib for point in sizes.curve])
        assert never_falls([point.limit_mib for point in sizes.curve])
        assert all(
            point.limit_mib is None or point.limit_mib >= point.request_mib for point in sizes.curve
        )
        assert (sizes.safe_batch or 0) <= (sizes.likely_batch or 0) <= max_batch


@pytest.mark.parametrize("name", ["A100/1g.5gb", "T4", "H100"])
def test_the_largest_batch_fits_and_the_next_does_not(predictor: Predictor, name: str) -> None:
    job = cnn()
    wanted = target(name)
    sizes = batch_sizes(predictor, job, wanted, max_batch=2**20)
    for batch, amount in ((sizes.safe_batch, "safe_bytes"), (sizes.likely_batch, "expected_bytes")):
        assert batch is not None
        at, above = (
            getattr(
                predictor.predict(dataclasses.replace(job, batch_size=size), gpu=wanted.gpu), amount
            )
            for size in (batch, batch + 1)
        )
        assert ceil_mib(at) <= wanted.available_mib
        assert batch == sizes.max_batch or above is None or ceil_mib(above) > wanted.available_mib


def test_the_curve_is_what_the_predictor_says_where_that_rises(predictor: Predictor) -> None:
    job = small_job(batch_size=7)
    sizes = batch_sizes(predictor, job, target("H200"), max_batch=500, coverage=0.9)
    assert [point.batch_size for point in sizes.curve] == batch_grid(500)
    last = sizes.curve[-1]
    estimate = predictor.predict(dataclasses.replace(job, batch_size=500), gpu="H200", coverage=0.9)
    assert last.request_mib >= ceil_mib(estimate.expected_bytes)
    assert sizes.safe_batch == sizes.likely_batch == 500  # it fits with room to spare
    assert sizes.coverage == 0.9


def test_where_nothing_fits_there_is_no_batch(predictor: Predictor) -> None:
    sizes = batch_sizes(predictor, small_job(), device(10))
    assert (sizes.safe_batch, sizes.likely_batch, sizes.reasons) == (None, None, ())


def test_outside_the_support_there_is_a_likely_batch_and_the_reason(predictor: Predictor) -> None:
    sizes = batch_sizes(
        predictor, small_job(family="transformer", gradient_accumulation=64), target("A100")
    )
    assert sizes.safe_batch is None
    assert sizes.likely_batch is not None
    assert any("gradient_accumulation" in reason for reason in sizes.reasons)
    assert all(point.limit_mib is None for point in sizes.curve)


def test_a_traced_peak_is_of_one_batch_only(predictor: Predictor) -> None:
    job = cnn()
    traced = dataclasses.replace(job, traced_peak_bytes=30 * 2**30)
    assert batch_sizes(predictor, traced, target("A100")) == batch_sizes(
        predictor, job, target("A100")
    )


@given(max_batch=st.integers(1, MAX_BATCH_SIZE), steps=st.sampled_from([1, 2, 16]))
def test_the_grid_rises_to_its_end(max_batch: int, steps: int) -> None:
    grid = batch_grid(max_batch, steps)
    assert grid[0] == 1
    assert grid[-1] == max_batch
    assert all(low < high <= low + max(1, -(-low // steps)) for low, high in pairwise(grid))


def test_a_job_of_very_many_layers_is_asked_at_fewer_batch_sizes(predictor: Predictor) -> None:
    layers = small_job().layers * 2000
    sizes = batch_sizes(predictor, small_job(layers=layers), target("H200"), max_batch=4096)
    assert len(sizes.curve) < 20
    assert never_falls([point.request_mib for point in sizes.curve])
