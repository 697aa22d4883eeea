"""What a trace can be asked, and by which words: what the command line and a child process's parent know without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.job.training_options import TrainingOptions

LOSSES: Final = ("auto", "cross_entropy", "mse", "bce", "mean")
"""Names of losses; ``auto`` takes the model's own or what fits its output."""
ZERO_GRAD: Final = ("before_forward", "before_backward", "after_step")
"""Where a training loop drops its gradients."""
PARALLEL: Final = ("none", "ddp", "fsdp", "fsdp_zero2")
"""How a job uses several GPUs: not at all; a replica on each; parameters, gradients and optimizer state split among them, with
parameters gathered for each block and given up after it (ZeRO-3), or kept from the forward to the backward pass (ZeRO-2)."""
DEFAULT_GPU: Final = "A100"
DEADLINE_SECONDS: Final = 600.0
"""Time for a whole trace in a child process, the import of torch included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What else is asked of a trace.

    Attributes:
        batches: batch sizes at which the memory is wanted too.
        max_batch: whether the largest batch that fits the GPU is wanted.
        gpus: whether a table of all known GPUs is wanted.
        curve: whether the memory over a step is wanted.
        job: whether the training job with its traced peak is wanted.
    """

    batches: tuple[int, ...] = ()
    max_batch: bool = False
    gpus: bool = False
    curve: bool = False
    job: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(TrainingOptions):
    """The training options, and what a trace has to know of the training loop besides.

    ``ranks`` counts the GPUs of every value of ``parallel``, not of replicas alone.

    Attributes:
        own_optimizer: an optimizer over the model's parameters, or a function from parameters to one; it replaces ``optimizer``.
        loss: a name of :data:`LOSSES`, or a function of the model's output.
        zero_grad: where the loop drops its gradients, one of :data:`ZERO_GRAD`.
        parallel: how several GPUs are used, one of :data:`PARALLEL`; each has the inputs' batch size, and each holds what is
            recorded.
        best_effort: whether to go on with a guess where values are needed, see
            :class:`~gpumemnet.tracing.best_effort.BestEffort`.
        keeps_names: whether batch, output and loss of a step live until the next step has its own, as in a loop without a
            function of its own.
        last_batch_size: samples in the last batch of an epoch, where it is smaller: two steps more are run, one of that size and
            one of the whole size again, because the allocator's cache holds blocks for both.
        forward_passes_first: forward passes in training mode before the optimizer exists, as a summary or a check of shapes runs.

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
