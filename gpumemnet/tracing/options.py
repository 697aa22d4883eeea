"""Names and defaults of a trace's options, for the command line and other code that loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.job.training_options import TrainingOptions

LOSSES: Final = ("auto", "cross_entropy", "mse", "bce", "mean")
"""Names of losses; ``auto`` takes the model's own loss, or one that fits its output."""
ZERO_GRAD: Final = ("before_forward", "before_backward", "after_step")
"""Where a training loop drops its gradients."""
PARALLEL: Final = ("none", "ddp", "fsdp", "fsdp_zero2")
"""How a job uses several GPUs.

``ddp`` holds a replica on each GPU.  ``fsdp`` and ``fsdp_zero2`` shard parameters, gradients and optimizer state.  With ``fsdp``
(ZeRO-3) gathered parameters are freed after each block; with ``fsdp_zero2`` (ZeRO-2) they stay until the backward pass.
"""
DEFAULT_GPU: Final = "A100"
DEADLINE_SECONDS: Final = 600.0
"""Time for a whole trace in a child process, including the import of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraResults:
    """Results that a trace computes on request.

    Attributes:
        batches: batch sizes at which to compute the memory too.
        max_batch: whether to find the largest batch size that fits the GPU.
        gpus: whether to compute the memory on every GPU of the catalogue.
        curve: whether to return the memory over one training step.
        job: whether to return the training job with its traced peak.
    """

    batches: tuple[int, ...] = ()
    max_batch: bool = False
    gpus: bool = False
    curve: bool = False
    job: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(TrainingOptions):
    """The training options, and how the training loop is written.

    ``ranks`` counts the GPUs for every value of ``parallel``, not only replicas.

    Attributes:
        own_optimizer: an optimizer over the model's parameters, or a function from parameters to one; it replaces ``optimizer``.
        loss: a name of :data:`LOSSES`, or a function of the model's output.
        zero_grad: where the loop drops its gradients, one of :data:`ZERO_GRAD`.
        parallel: how several GPUs are used, one of :data:`PARALLEL`; each GPU has the batch size of the inputs.
        best_effort: whether to continue with a guess where the model needs the values of tensors, see
            :class:`~gpumemnet.tracing.missing_values.GuessedValues`.
        keeps_names: whether batch, output and loss of a step stay alive until the next step replaces them, as in a loop that is
            not inside a function.
        last_batch_size: samples in the last batch of an epoch, if it is smaller.  Two further steps run, one of that size and one
            of the full size, because the allocator's cache then holds blocks for both.
        forward_passes_first: forward passes in training mode before the optimizer exists, such as those of a model summary.

    Raises:
        InvalidJobError, InvalidRequestError: names the option and its values.
    """

    own_optimizer: object = None
    loss: object = LOSSES[0]
    zero_grad: str = ZERO_GRAD[0]
    parallel: str = PARALLEL[0]
    best_effort: bool = False
    keeps_names: bool = False
    last_batch_size: int | None = None
    forward_passes_first: int = 0

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        for name, choices in (("loss", LOSSES), ("zero_grad", ZERO_GRAD), ("parallel", PARALLEL)):
            value = getattr(self, name)
            if (name != "loss" or isinstance(value, str)) and value not in choices:
                raise InvalidRequestError(f"must be one of {', '.join(choices)}, not {describe(value)}", name)


DEFAULT_OPTIONS: Final = TraceOptions()
