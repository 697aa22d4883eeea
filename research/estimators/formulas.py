"""Estimators that are one formula over a job's totals: naive, Horus, DeepSpeed's ZeRO, ``accelerate
estimate-memory``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.element_types import ELEMENT_BYTES, HALF_BYTES
from gpumemnet.physics.optimizers import OPTIMIZER_RULES
from research.estimators.published_formulas import horus, naive

from .estimator import PublishedEstimator, Subject

ADAM_BYTES: Final = 16
"""DeepSpeed's count for one parameter: master weights, two moments and gradients in fp32."""


def naive_parts(subject: Subject) -> Mapping[str, int]:
    """Parameters and the input of one sample in fp32
    (:func:`research.estimators.published_formulas.naive`)."""
    return {"total": int(naive([subject.job])[0])}


def copies_parts(subject: Subject) -> Mapping[str, int]:
    """Parameters × bytes × copies (weight, gradient, optimizer state), and all activations of the
    batch once."""
    job, element = subject.job, ELEMENT_BYTES[subject.job.precision]
    copies = 2 + OPTIMIZER_RULES[job.optimizer].state_copies
    activations = (job.total_activations or 0) * job.batch_size * element.activation
    return {
        "weights, gradients, state": round(parameters(job) * element.weight * copies),
        "activations": activations,
    }


def horus_parts(subject: Subject) -> Mapping[str, int]:
    """Horus's formula as it was published (:func:`research.estimators.published_formulas.horus`)."""
    return {"total": int(horus([subject.job])[0])}


def zero2_bytes(parameters: int, gpus: int, *, offloads_optimizer: bool = False) -> int:
    """Model states per GPU under ZeRO-2, without activations.

    Two bytes for each parameter in half precision; gradients, master weights and Adam's moments are
    divided.

    Args:
        parameters: of the whole model.
        gpus: number of GPUs.
        offloads_optimizer: whether the optimizer runs on the CPU.
    """
    kept = HALF_BYTES * parameters
    return kept if offloads_optimizer else kept + (ADAM_BYTES + HALF_BYTES) * parameters // gpus


def zero3_bytes(
    parameters: int,
    largest_layer: int,
    gpus: int,
    *,
    offloads_optimizer: bool = False,
    offloads_parameters: bool = False,
) -> int:
    """Model states per GPU under ZeRO-3, without activations.

    Args:
        parameters: of the whole model.
        largest_layer: parameters of its largest layer, which is gathered while it runs.
        gpus: number of GPUs.
        offloads_optimizer, offloads_parameters: what lies on the CPU; parameters only with the
            optimizer.
    """
    gathered = 2 * HALF_BYTES * largest_layer
    if offloads_parameters:
        return gathered
    return (
        gathered
        + (HALF_BYTES if offloads_optimizer else ADAM_BYTES + HALF_BYTES) * parameters // gpus
    )


def zero2_parts(subject: Subject) -> Mapping[str, int]:
    """ZeRO-2 on the job's own number of GPUs."""
    return {"model states": zero2_bytes(parameters(subject.job), subject.job.ranks)}


def zero3_parts(subject: Subject) -> Mapping[str, int]:
    """ZeRO-3 on the job's own number of GPUs."""
    largest = max((layer.parameters for layer in subject.job.layers), default=0)
    return {"model states": zero3_bytes(parameters(subject.job), largest, subject.job.ranks)}


def accelerate_parts(subject: Subject) -> Mapping[str, int]:
    """Adam's step: four times the weights, whatever the batch and the optimizer.

    The tool prints the largest of weights, gradients, optimizer and step; with Adam that is the
    step, four copies.
    """
    weights = parameters(subject.job) * ELEMENT_BYTES[subject.job.precision].weight
    return dict.fromkeys(("weights", "gradients", "first moment", "second moment"), weights)


def parameters(job: TrainingJob) -> int:
    """Parameters of ``job``, which every job of a dataset states."""
    assert job.total_parameters is not None
    return job.total_parameters


_formula = partial(PublishedEstimator, needs="totals")
NAIVE: Final = _formula(
    name="naive",
    leaves_out="gradients, optimizer, activations, allocator, workspaces, context",
    source="blog 'Estimating GPU Memory Consumption of Deep Learning Models'",
    parts=naive_parts,
)
COPIES: Final = _formula(
    name="copies and activations",
    leaves_out="what is freed or reused, allocator, workspaces, context",
    source="the rule of thumb of most calculators: parameters x bytes x copies + activations",
    parts=copies_parts,
)
HORUS: Final = _formula(
    name="Horus",
    leaves_out="optimizer, allocator, workspaces, context; multiplies gradients by the batch size",
    source="Yeung et al., IEEE TPDS 33, 2022",
    parts=horus_parts,
)
ZERO2: Final = _formula(
    name="DeepSpeed ZeRO-2",
    leaves_out="activations, inputs, allocator, workspaces, context; assumes Adam in mixed precision",
    source="DeepSpeed, estimate_zero2_model_states_mem_needs",
    parts=zero2_parts,
)
ZERO3: Final = PublishedEstimator(
    name="DeepSpeed ZeRO-3",
    needs="layers",
    leaves_out="activations, inputs, allocator, workspaces, context; assumes Adam in mixed precision",
    source="DeepSpeed, estimate_zero3_model_states_mem_needs",
    parts=zero3_parts,
)
ACCELERATE: Final = _formula(
    name="accelerate estimate-memory",
    leaves_out="activations, inputs, allocator, workspaces, context; assumes Adam",
    source="Hugging Face accelerate, commands/estimate.py",
    parts=accelerate_parts,
)
