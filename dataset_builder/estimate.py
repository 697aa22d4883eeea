"""A rough closed-form estimate of a job's memory: good enough to spread samples and to admit jobs side by side, no more.

Weights, gradients and optimizer state follow from the precision and the optimizer; activations that the backward pass needs
are counted once per layer output.  Nothing measured enters, and nothing estimated here ever enters a dataset.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.job import TrainingJob
from gpumemnet.physics import ELEMENT_BYTES, optimizer_copies
from gpumemnet.units import MIB

CONTEXT_ALLOWANCE_BYTES: Final = 600 * MIB
WORKSPACE_ALLOWANCE_BYTES: Final = 64 * MIB
"""Two cuBLAS workspaces of a Hopper GPU: forward and backward run on different host threads."""

_CHECKPOINTED_SHARE: Final = 0.35
"""What is left of the activations when only the blocks' inputs are kept; a block has about three layers."""


def rough_bytes(job: TrainingJob) -> int:
    """Memory of the process that runs ``job``, CUDA context included, within about a factor of two."""
    size = ELEMENT_BYTES[job.precision]
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    weights = job.total_parameters * (size.weight + size.weight_copy)
    gradients = job.trainable_parameters * size.weight
    copies = optimizer_copies(job.optimizer, job.optimizer_implementation)
    state, step_scratch = gradients * copies.state, gradients * copies.temporary
    saved, largest = _activations(job)
    kept = saved * (_CHECKPOINTED_SHARE if job.checkpointing == "every_block" else 1.0)
    activations = job.batch_size * (size.activation * (kept + 2 * largest) + 4 * job.input_elements)
    tensors = weights + state + gradients + max(activations, step_scratch)
    return int(tensors) + CONTEXT_ALLOWANCE_BYTES + WORKSPACE_ALLOWANCE_BYTES


def _activations(job: TrainingJob) -> tuple[int, int]:
    """Outputs per sample that the backward pass needs, and the largest single one; frozen layers at the input keep none."""
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    frozen = job.total_parameters - job.trainable_parameters
    saved = largest = 0
    for layer in job.layers:
        largest = max(largest, layer.activations)
        if frozen > 0:
            frozen -= layer.parameters
        else:
            saved += layer.activations
    return saved, largest


def operations_per_step(multiply_adds: int, job: TrainingJob) -> int:
    """Floating-point operations of one optimizer step: forward two, backward four per multiply-add (Kaplan et al., 2020)."""
    recomputed = 2 if job.checkpointing == "every_block" else 0
    return (6 + recomputed) * multiply_adds * job.batch_size * job.gradient_accumulation
