"""Estimators that are one formula over a job's totals: naive, Horus, DeepSpeed's ZeRO, ``accelerate
estimate-memory``.

Naive and Horus are those that GPUMemNet compares itself with (arXiv 2602.17817, section 2): exactly
as published, without corrections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.element_types import ELEMENT_BYTES, HALF_BYTES
from gpumemnet.physics.optimizers import OPTIMIZER_RULES

from .estimator import PublishedEstimator, Subject

ADAM_BYTES: Final = 16
"""DeepSpeed's count for one parameter: master weights, two moments and gradients in fp32."""


FP32_BYTES: Final = 4


def naive(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """Bytes of parameters and of one input in fp32, shape ``[B]``.

    Source: blog "Estimating GPU Memory Consumption of Deep Learning Models": parameters × 4 B +
    input size × 4 B.  It names no batch, so the input is that of one sample.
    """
    return np.array(
        [FP32_BYTES * (parameters(job) + job.input_elements) for job in jobs], dtype=np.float64
    )


def horus(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """4 B × (batch × activations + parameters + batch × gradients), with as many gradients as
    parameters; shape ``[B]``.

    Source: Horus (Yeung et al., IEEE TPDS 33, 2022).  Gradients do not grow with the batch, yet the
    formula multiplies them by it.  The 800 or 1,000 MB that some variants add for CUDA are left
    out.
    """
    return np.array([FP32_BYTES * _horus_elements(job) for job in jobs], dtype=np.float64)


def _horus_elements(job: TrainingJob) -> int:
    assert job.total_activations is not None
    return job.batch_size * (job.total_activations + parameters(job)) + parameters(job)


def naive_parts(subject: Subject) -> Mapping[str, int]:
    """Parameters and the input of one sample in fp32
    (:func:`naive`)."""
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
    """Horus's formula as it was published (:func:`horus`)."""
    return {"total": int(horus([subject.job])[0])}


def zero2_bytes(parameters: int, gpus: int) -> int:
    """Model states per GPU under ZeRO-2, without activations.

    Two bytes for each parameter in half precision; gradients, master weights and Adam's moments are
    divided.
    """
    return HALF_BYTES * parameters + (ADAM_BYTES + HALF_BYTES) * parameters // gpus


def zero3_bytes(parameters: int, largest_layer: int, gpus: int) -> int:
    """Model states per GPU under ZeRO-3, without activations.

    Args:
        parameters: of the whole model.
        largest_layer: parameters of its largest layer, which is gathered while it runs.
        gpus: number of GPUs.
    """
    return 2 * HALF_BYTES * largest_layer + (ADAM_BYTES + HALF_BYTES) * parameters // gpus


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
