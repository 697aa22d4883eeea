"""What a trace can be asked, and by which words: what the command line and a child process's parent know without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

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


class TraceSettings(TypedDict, total=False):
    """Settings of :func:`gpumemnet.tracing.model_trace.trace_model` that are plain words and numbers."""

    loss: str
    optimizer: str
    precision: str
    optimizer_implementation: str
    checkpointing: str
    channels_last: bool
    gradient_accumulation: int
    zero_grad: str
    attention_kernel: str | None
    cudnn_benchmark: bool
    parallel: str
    ranks: int
    best_effort: bool
