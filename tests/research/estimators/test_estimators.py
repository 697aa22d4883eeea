"""Other people's estimators on worked examples: the numbers are computed by hand from the papers'
formulas."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from gpumemnet.extract.module_calls import ModelInputs
from gpumemnet.gpu import device_profile
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.units import MIB
from research.estimators.dnnmem import (
    DNNMEM,
    DNNMEM_OF_MODULES,
    FRAMEWORK_BYTES,
    Graph,
    Operator,
    recorded_graph,
    schedule,
)
from research.estimators.estimator import NotCoveredError, PublishedEstimator, Subject
from research.estimators.fake_tensor import FAKE_TENSOR, MEM_TRACKER
from research.estimators.formulas import (
    ACCELERATE,
    COPIES,
    HORUS,
    NAIVE,
    ZERO2,
    ZERO3,
    zero2_bytes,
    zero3_bytes,
)
from research.estimators.transformer_formulas import (
    ELEUTHER,
    KORTHIKANTI,
    LLMEM,
    llm_parts,
    pages,
    transformer_shape,
)

GPU = device_profile("A100-40GB")
MLP = TrainingJob(
    family="mlp",
    batch_size=10,
    input_elements=100,
    optimizer="adam",
    precision="fp32",
    layers=(Layer("linear", 50, 5_000), Layer("relu", 50), Layer("linear", 10, 500)),
)
TEXT = TrainingJob(
    family="transformer",
    batch_size=4,
    input_elements=16,
    sequence_length=16,
    optimizer="adam",
    precision="fp32",
    layers=(
        Layer("embedding", 16 * 128, 1_000 * 128),
        Layer("layer_norm", 16 * 128, 256),
        Layer("linear", 16 * 384, 3 * 128 * 128),
        Layer("attention", 16 * 128),
        Layer("linear", 16 * 1_000, 128_000),
    ),
)


def subject(job: TrainingJob, build: Callable[[], object] | None = None) -> Subject:
    return Subject(job, GPU, 500 * MIB, {}, build)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("estimator", "job", "expected_bytes"),
    [
        (NAIVE, MLP, 4 * (5_500 + 100)),
        (COPIES, MLP, 4 * 4 * 5_500 + 4 * 10 * 110),
        (HORUS, MLP, 4 * (10 * 110 + 5_500 + 10 * 5_500)),
        (ACCELERATE, MLP, 4 * 4 * 5_500),
        (ZERO2, MLP, 20 * 5_500),
        (ZERO3, MLP, 4 * 5_000 + 18 * 5_500),
        # One block of 16 tokens, width 128, two heads: 66 bytes an element and 9 a score in fp32;
        # twice 34 and 5 by the blog.
        (KORTHIKANTI, TEXT, 16 * (128_000 * 2 + 256 + 49_152) + 16 * 4 * (66 * 128 + 9 * 2 * 16)),
        (ELEUTHER, TEXT, 16 * (128_000 * 2 + 256 + 49_152) + 2 * 16 * 4 * (34 * 128 + 5 * 2 * 16)),
    ],
    ids=lambda value: value.name if isinstance(value, PublishedEstimator) else "",
)
def test_a_formula_gives_what_its_paper_says(
    estimator: PublishedEstimator, job: TrainingJob, expected_bytes: int
) -> None:
    estimate = estimator.estimate(subject(job))
    assert estimate.total_bytes == expected_bytes == sum(estimate.parts.values())
    assert estimate.seconds >= 0


def test_zero_divides_what_the_gpus_share() -> None:
    assert zero2_bytes(1_000, 4) == 2_000 + 4_500
    assert zero3_bytes(1_000, 100, 4) == 400 + 4_500


def test_llmem_adds_its_five_parts() -> None:
    shape = transformer_shape(subject(TEXT))
    assert (shape.hidden, shape.layers, shape.heads, shape.vocabulary) == (128, 1, 2, 1_000)
    found = llm_parts(shape, 4, 500 * MIB)
    chunks = 128_000 + 16 * MIB
    assert found.half == pages(chunks * 2)
    assert found.master == pages(chunks * 4)
    assert found.state == 3 * 2 * MIB  # each matrix is smaller than a page
    assert found.outputs == 2 * MIB
    assert found.head == 4 * 2 * MIB
    total = found.base + found.half + found.master + found.state + found.outputs + found.head
    assert LLMEM.estimate(subject(TEXT)).total_bytes == total


def test_formulas_for_transformers_have_no_answer_for_other_networks() -> None:
    for estimator in (KORTHIKANTI, ELEUTHER, LLMEM):
        with pytest.raises(NotCoveredError, match="no transformer"):
            estimator.estimate(subject(MLP))


@dataclass
class Run:
    """A model as an estimator gets it."""

    network: nn.Module
    inputs: ModelInputs
    options: TraceOptions
    platform: Platform


def run(optimizer: str = "adam") -> Run:
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(1_024, 1_024), nn.ReLU(), nn.Linear(1_024, 1_024))
    inputs = ModelInputs((torch.empty(1_024, 1_024, device="meta"),), {}, 1_024)
    return Run(network, inputs, TraceOptions(optimizer=optimizer, loss="mse"), Platform(device=GPU))


MATRIX, BIAS = 4 * MIB, 4 * 1_024


def normed() -> Run:
    """The same with a layer norm between its matrices."""
    given = run()
    with torch.device("meta"):
        network = nn.Sequential(
            nn.Linear(1_024, 1_024), nn.LayerNorm(1_024), nn.Linear(1_024, 1_024)
        )
    return replace(given, network=network)


def test_fake_tensor_counts_no_optimizer_and_mem_tracker_does() -> None:
    of_adam = MEM_TRACKER.estimate(subject(MLP, run))
    of_sgd = MEM_TRACKER.estimate(subject(MLP, lambda: run("sgd")))
    fake = FAKE_TENSOR.estimate(subject(MLP, run))
    state = 4 * (MATRIX + BIAS)
    assert of_adam.parts["optimizer_state"] == state > of_sgd.parts.get("optimizer_state", 0)
    assert "optimizer_state" not in fake.parts
    assert fake.parts["parameter"] == 2 * (MATRIX + BIAS)
    assert fake.total_bytes < of_adam.total_bytes


def test_dnnmem_frees_a_tensor_after_its_last_use_forward_or_backward() -> None:
    # x -> A (keeps x) -> a -> B (keeps nothing) -> b, with one weight w for A.
    graph = Graph(sizes=[100, 200, 30, 40], weights=[0], trained={0}, inputs=[1])
    graph.operators = [
        Operator(reads=(1, 0), makes=(2,), keeps=(1,), has_gradient=True),
        Operator(reads=(2,), makes=(3,), keeps=(), has_gradient=True),
    ]
    events, sizes = schedule(graph)
    # a is read last by B in the forward pass; b has no later reader; then the gradients of a and of
    # w.
    assert [event if event >= 0 else -1 for event in events] == [0, 1, 2, 3, -1, -1, 4, 5, -1]
    assert {~event for event in events if event < 0} == {2, 3, 4}
    assert sizes[4:] == [30, 100]


def test_dnnmem_of_a_small_network() -> None:
    graph = recorded_graph(subject(MLP, run))
    made = [
        graph.sizes[tensor]
        for operator in graph.operators
        for tensor in operator.makes
        if operator.has_gradient
    ]
    assert made == [MATRIX, MATRIX, 4]  # two linear layers and the loss: ReLU runs in place
    estimate = DNNMEM.estimate(subject(MLP, run))
    # Weights and their gradients, input, targets, the kept activation, the output; and the
    # gradients of the last two.
    reserved = estimate.parts["reserved"]
    assert 2 * 2 * MATRIX + 4 * MATRIX <= reserved <= 2 * 2 * MATRIX + 6 * MATRIX + 6 * MIB
    assert estimate.total_bytes == reserved + FRAMEWORK_BYTES + 500 * MIB
    assert DNNMEM.estimate(subject(MLP, lambda: run("sgd"))).total_bytes == estimate.total_bytes


def test_dnnmem_of_modules_does_not_see_what_a_module_keeps_inside() -> None:
    whole, of_modules = (
        recorded_graph(subject(MLP, normed), of_modules=coarse) for coarse in (False, True)
    )
    sizes = [
        [graph.sizes[tensor] for operator in graph.operators for tensor in operator.makes]
        for graph in (whole, of_modules)
    ]
    statistic = 4 * 1_024
    assert sizes[0].count(statistic) == 2  # mean and deviation of the layer norm
    assert sizes[1].count(statistic) == 0
    assert sizes[1].count(MATRIX) == 4  # results of the three modules, and the targets
    assert DNNMEM_OF_MODULES.estimate(subject(MLP, normed)).total_bytes > 500 * MIB
