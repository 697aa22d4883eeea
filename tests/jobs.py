"""Jobs for tests: hypothesis strategies of any valid job, one small job written out, and plain MLPs
of any width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from gpumemnet.job.layers import KINDS, Layer
from gpumemnet.job.training_job import (
    ACTIVATION_FUNCTIONS,
    ATTENTION_KERNELS,
    CHECKPOINTING,
    FAMILIES,
    OPTIMIZER_IMPLEMENTATIONS,
    OPTIMIZERS,
    OUTPUTS_FREED,
    PRECISIONS,
    TrainingJob,
)

SMALL_LAYERS = (
    Layer("linear", 512, 100 * 512 + 512),
    Layer("batch_norm1d", 512, 1024),
    Layer("relu", 512),
    Layer("dropout", 512),
    Layer("linear", 10, 512 * 10 + 10),
)


def small_job(**changes: Any) -> TrainingJob:
    """A three-line MLP; ``changes`` replace its fields."""
    values: dict[str, Any] = {
        "family": "mlp",
        "batch_size": 64,
        "input_elements": 100,
        "optimizer": "adam",
        "precision": "fp32",
        "activation_function": "relu",
        "layers": SMALL_LAYERS,
    }
    return TrainingJob(**{**values, **changes})


def mlp(width: int, batch_size: int = 512, depth: int = 3) -> TrainingJob:
    """A plain MLP for 100 classes."""
    layers = [Layer("linear", width, (1024 + 1) * width), Layer("relu", width)]
    layers += [Layer("linear", width, (width + 1) * width), Layer("relu", width)] * (depth - 1)
    return small_job(
        batch_size=batch_size,
        input_elements=1024,
        layers=(*layers, Layer("linear", 100, (width + 1) * 100)),
    )


def layers(maximum: int = 10**7) -> st.SearchStrategy[Layer]:
    """Layers of every kind, with sizes from nothing to ``maximum`` elements."""
    sizes = st.one_of(st.integers(0, 5000), st.integers(0, maximum))
    kinds = st.sampled_from([*KINDS, "something_new"])
    trains, blocks = st.none() | st.booleans(), st.none() | st.integers(0, 20)
    said = st.builds(Layer, kinds, sizes, sizes, trains, blocks)
    return said | st.builds(Layer, kinds, sizes, sizes, st.none(), st.none())


@st.composite
def jobs(draw: st.DrawFn, maximum: int = 10**7) -> TrainingJob:
    """Valid jobs of every family and option, with and without layers."""
    count = st.integers(0, maximum)
    values: dict[str, Any] = {
        "family": draw(st.sampled_from(FAMILIES)),
        "batch_size": draw(st.integers(1, 70_000)),
        "input_elements": draw(st.integers(1, 10**6)),
        "optimizer": draw(st.sampled_from(OPTIMIZERS)),
        "precision": draw(st.sampled_from(PRECISIONS)),
        "layers": tuple(draw(st.lists(layers(maximum), max_size=12))),
        "activation_function": draw(st.none() | st.sampled_from(ACTIVATION_FUNCTIONS)),
        "sequence_length": draw(st.none() | st.integers(1, 4096)),
        "attention_kernel": draw(st.none() | st.sampled_from(ATTENTION_KERNELS)),
        "optimizer_implementation": draw(st.sampled_from(OPTIMIZER_IMPLEMENTATIONS)),
        "checkpointing": draw(st.sampled_from(CHECKPOINTING)),
        "channels_last": draw(st.booleans()),
        "gradient_accumulation": draw(st.integers(1, 8)),
        "cudnn_benchmark": draw(st.booleans()),
        "ranks": draw(st.sampled_from([1, 1, 1, 2, 64])),
        "batches_on_gpu": draw(st.none() | st.integers(1, 4)),
        "outputs_freed": draw(st.none() | st.sampled_from(OUTPUTS_FREED)),
    }
    if not values["layers"]:
        values["total_activations"], values["total_parameters"] = draw(count), draw(count)
    may_train = (layer.parameters for layer in values["layers"] if layer.trains is not False)
    parameters = values.get("total_parameters", sum(may_train))
    values["trainable_parameters"] = draw(st.none() | st.integers(0, parameters))
    return TrainingJob(**values)


def totals_only(job: TrainingJob) -> TrainingJob:
    """The job without its layer list: only the totals and the options."""
    return replace(job, layers=())
