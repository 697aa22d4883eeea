"""A rough closed-form estimate of a job's memory: accurate enough to spread samples and to admit
jobs side by side.

Weights, gradients and optimizer state follow from the precision and the optimizer; activations that
the backward pass needs are counted once per layer output.  It uses no measurement, and no dataset
contains it.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.job.layers import LAYER_GROUPS
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.optimizers import optimizer_copies
from gpumemnet.physics.saved_tensors import LOSS_TENSORS
from gpumemnet.units import MIB

from .options import Options

CONTEXT_ALLOWANCE_BYTES: Final = 600 * MIB
WORKSPACE_ALLOWANCE_BYTES: Final = 64 * MIB
"""Two cuBLAS workspaces of a Hopper GPU, because forward and backward run on different host
threads."""

_CHECKPOINTED_SHARE: Final = 0.35
"""Share of the activations that remains when only the blocks' inputs are kept; a block has about
three layers."""
_ATTENTION_KINDS: Final = frozenset({"softmax", *LAYER_GROUPS["attention"]})
_NORMS: Final = frozenset(LAYER_GROUPS["norm"])


def rough_bytes(job: TrainingJob) -> int:
    """Memory of the process that runs ``job``, CUDA context included, within about a factor of
    two."""
    element = ELEMENT_BYTES[job.precision]
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    weights = job.total_parameters * (element.weight + element.weight_copy)
    gradients = job.trainable_parameters * element.weight
    copies = optimizer_copies(job.optimizer, job.optimizer_implementation)
    state, step_scratch = gradients * copies.state, gradients * copies.temporary
    saved, largest = _activations(job)
    kept = _kept_with_checkpointing(job, saved) if job.checkpointing == "every_block" else saved
    logits = job.layers[-1].activations if job.layers else 0
    transient = max(2 * largest * element.activation, LOSS_TENSORS * logits * element.uncast)
    activations = job.batch_size * (element.activation * kept + transient + 4 * job.input_elements)
    tensors = weights + state + gradients + max(activations, step_scratch)
    return int(tensors) + CONTEXT_ALLOWANCE_BYTES + WORKSPACE_ALLOWANCE_BYTES


def _activations(job: TrainingJob) -> tuple[int, int]:
    """Outputs per sample that the backward pass needs, and the largest single one; frozen layers at
    the input keep none."""
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    frozen = job.total_parameters - job.trainable_parameters
    outputs = [layer.activations for layer in job.layers]
    unsaved = 0
    while frozen > 0 and unsaved < len(outputs):
        frozen -= job.layers[unsaved].parameters
        unsaved += 1
    return sum(outputs[unsaved:]), max(outputs, default=0)


def _kept_with_checkpointing(job: TrainingJob, saved: int) -> float:
    """The part of ``saved`` that is kept when blocks are recomputed: their inputs, the logits, and
    one block at a time.

    A block with attention has two norms as wide as its input, and about one attention layer.
    """
    attentions = sum(layer.kind in _ATTENTION_KINDS for layer in job.layers)
    if not attentions:
        return saved * _CHECKPOINTED_SHARE
    inputs = sum(layer.activations for layer in job.layers if layer.kind in _NORMS) / 2
    logits = job.layers[-1].activations
    return min(saved, inputs + logits + (saved - logits) / attentions)


def operations_per_step(multiply_adds: int, options: Options) -> int:
    """Floating-point operations of one optimizer step: forward two, backward four per multiply-add
    (Kaplan et al., 2020)."""
    recomputed = 2 if options.checkpointing == "every_block" else 0
    return (6 + recomputed) * multiply_adds * options.batch_size * options.gradient_accumulation
