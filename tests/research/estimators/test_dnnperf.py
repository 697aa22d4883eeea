"""DNNPerf's graphs by hand, and a network trained on jobs whose memory is a known sum."""

import numpy as np
import pytest

from gpumemnet.gpu import device_profile
from gpumemnet.job.layers import KINDS, Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.units import MIB
from research.estimators.dnnperf import Graphs, train_dnnperf
from research.estimators.estimator import NotCoveredError, Subject
from tests.jobs import totals_only

CONTEXT = 500 * MIB


def job_of(batch_size: int, *layers: Layer) -> TrainingJob:
    return TrainingJob(
        family="mlp",
        batch_size=batch_size,
        input_elements=100,
        optimizer="adam",
        precision="fp32",
        layers=layers,
    )


def test_a_job_becomes_a_chain_with_edges_both_ways() -> None:
    first, rest = Layer("linear", 50, 5_000), (Layer("relu", 50), Layer("linear", 10, 500))
    graphs = Graphs.of([job_of(10, first, *rest), job_of(20, first)])
    assert [KINDS[kind] for kind in graphs.kinds.tolist()] == ["linear", "relu", "linear", "linear"]
    assert graphs.ends.tolist() == [[0, 1, 1, 2], [1, 2, 0, 1]]
    assert graphs.job_of_node.tolist() == [0, 0, 0, 1]
    assert graphs.job_of_edge.tolist() == [0, 0, 0, 0]
    sizes = np.expm1(10 * graphs.nodes.double().numpy())
    expected = [
        [20_000, 4_000, 2_000],
        [0, 2_000, 2_000],
        [2_000, 2_000, 400],
        [20_000, 8_000, 4_000],
    ]
    np.testing.assert_allclose(sizes, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(
        np.expm1(10 * graphs.edges.double().numpy()).ravel(), [2_000] * 4, rtol=1e-4
    )


@pytest.mark.nightly
def test_it_learns_a_sum_over_layers_and_answers_for_jobs_it_has_not_seen() -> None:
    random = np.random.default_rng(0)
    widths = [random.integers(64, 4_096, size=random.integers(2, 5)).tolist() for _ in range(80)]
    jobs = [
        job_of(
            int(random.integers(64, 4_096)),
            *(Layer("linear", width, 1_000 * width) for width in row),
        )
        for row in widths
    ]
    needed = [
        sum(16 * each.parameters + 8 * job.batch_size * each.activations for each in job.layers)
        for job in jobs
    ]
    memory = 64.0 * MIB + np.array(needed)
    learned = np.append(memory[:60], np.nan)  # a job that ran out of memory is left out
    estimator = train_dnnperf([*jobs[:60], jobs[0]], learned, steps=50)
    gpu = device_profile("A100-40GB")
    estimates = [estimator.estimate(Subject(job, gpu, CONTEXT, {})) for job in jobs[60:]]
    errors = [
        abs(each.parts["learned"] / size - 1)
        for each, size in zip(estimates, memory[60:], strict=True)
    ]
    constant = np.abs(np.median(memory[:60]) / memory[60:] - 1)
    assert np.median(errors) < 0.3 < np.median(constant)
    assert all(each.total_bytes == each.parts["learned"] + CONTEXT for each in estimates)
    with pytest.raises(NotCoveredError, match="no layers"):
        estimator.estimate(Subject(totals_only(jobs[0]), gpu, CONTEXT, {}))
