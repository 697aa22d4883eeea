"""What a rule of an operator is: a kernel that replaces its own on meta tensors, or the scratch
memory that it takes on CUDA.

Replacing kernels (:data:`OVERRIDES`) are registered with PyTorch's dispatcher under the autograd
key of meta tensors, ahead of autograd, so that autograd saves what it would save on CUDA.  They run
for calls from Python and from C++, also inside ``multi_head_attention_forward``, and only for meta
tensors.  The operator's own kernel is reached through the autograd key that no device uses.

Scratch memory (:class:`Scratch`) is what the CUDA code of an operator allocates from the caching
allocator and frees before it returns.  It is not visible to the dispatcher.  So rules from
PyTorch's CUDA sources compute it from the operator's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from torch import Tensor

from gpumemnet.cudnn.session import OFF, CudnnSession, open_session
from gpumemnet.gpu import DeviceProfile
from gpumemnet.torch_private.names import (
    Function,
    OpOverload,
    schema,
)
from gpumemnet.tracing.api import TraceOptions

Operator = Any
"""An ``OpOverload`` such as ``torch.ops.aten.dropout.default``."""

Kernel = Function
"""Called as ``kernel(original, *args, **kwargs)``; ``original(*args, **kwargs)`` is the operator
without this override."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The GPU and the process-wide switches that decide which kernels run.

    Attributes:
        device: profile of the GPU.
        attention_kernel: the scaled-dot-product kernel to use; ``None`` for the kernel that PyTorch
            would choose.
        cudnn_benchmark: whether cuDNN tries every convolution algorithm
            (``torch.backends.cudnn.benchmark``).
        tf32: whether fp32 convolutions may run on TF32 tensor cores
            (``torch.backends.cudnn.allow_tf32``, on by default).
        further_search_bytes: returns what that search tries beyond the workspaces of plans, for a
            convolution, an operation and the bytes of the GPU, such as the transforms of earlier
            versions of cuDNN; ``None`` for nothing.
        cudnn: the cuDNN that lists its plans for convolutions; ``None`` to compute workspaces by
            rules.
    """

    device: DeviceProfile
    attention_kernel: str | None = None
    cudnn_benchmark: bool = False
    tf32: bool = True
    further_search_bytes: Callable[[Any, str, int], int] | None = None
    cudnn: CudnnSession | None = None

    @classmethod
    def of(cls, device: DeviceProfile, options: TraceOptions) -> Platform:
        """The platform of a job with ``options`` on ``device``."""
        return cls(
            device=device,
            attention_kernel=options.attention_kernel,
            cudnn_benchmark=options.cudnn_benchmark,
            tf32=options.tf32,
        )

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self.device.compute_capability


def with_cudnn(platform: Platform, cudnn: str) -> tuple[Platform, tuple[str, ...]]:
    """Return the platform with the cuDNN that is to be asked, and notes on why an installed one is
    not.

    Args:
        platform: the GPU and its switches.
        cudnn: ``off``, ``auto`` or the path of a cuDNN library.

    Raises:
        InvalidRequestError: ``cudnn`` is a path, and the cuDNN there cannot answer.
    """
    if cudnn == OFF:
        return platform, ()
    session, reason = open_session(cudnn)
    if session is not None and not session.supports(platform.device):
        reason, session = f"cuDNN {session.version} does not know {platform.device.name}", None
    notes = (f"convolution workspaces come from rules: {reason}",) if reason else ()
    return replace(platform, cudnn=session), notes


OVERRIDES: Final[dict[Operator, Kernel]] = {}
"""The kernels that differ on CUDA, by ``OpOverload``; each family's module adds its own.  A kernel
is called as in :func:`~gpumemnet.torch_private.names.overriding_kernels`."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """One piece of scratch memory.

    An operator may allocate several pieces in turn.  Each is freed before the next is allocated,
    unless it is held.

    Attributes:
        expected_bytes: its most likely size; 0 if only a bound is known.
        bound_bytes: upper bound of its size.
        kind: its purpose: ``attention``, ``reduction``, ``sort``, ``copy`` …, or one of those of
            convolutions in :mod:`gpumemnet.tracing.timeline`.
        held: whether it stays allocated until the operator returns, or until the next output if it
            comes between two outputs.
        after: number of the operator's new outputs that are allocated before it; ``None`` for all
            of them.
        once: key of a piece that a thread needs only at the first call with this key; ``None`` for
            a piece that every call needs.  After such a piece is freed, the allocator's cache is
            emptied (``torch.cuda.empty_cache``).
    """

    expected_bytes: int
    bound_bytes: int
    kind: str
    held: bool = False
    after: int | None = None
    once: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator.

    Attributes:
        arguments: values by the names of the operator's schema, defaults included.
        outputs: the tensors that it returned.
        platform: the GPU that it runs on.
    """

    arguments: Mapping[str, Any]
    outputs: Sequence[Tensor]
    platform: Platform


Scratches = tuple[Scratch, ...]
"""All that an operator takes for a while."""
Rule = Callable[[Call], Scratches]
"""Returns the scratch memory of an operator's call."""

SCRATCH_RULES: Final[dict[Any, Rule]] = {}
"""Operator → the rule for its scratch memory; each family's module adds its own."""

# Not modelled:
# * cross-entropy, pooling, upsampling, dropout, cat: no scratch, or a few bytes.
# * cumulative sums, top-k: one state per block of threads; the sort of the result is small.
# * foreach and fused optimizers, gradient scaler: lists of tensors travel as kernel arguments.
# * recurrent cuDNN layers: cuDNN's workspace for them is not documented.
# * linear algebra, cuSPARSE, FFT over one dimension: their libraries' workspaces are not modelled.
# * nonzero, unique, boolean masks: sizes depend on the data.
# * memory that cuDNN and cuBLAS allocate by themselves: outside the allocator: it counts as
#   context.


def scratch(
    operator: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Tensor],
    platform: Platform,
) -> Scratches:
    """Return the scratch memory that one call of ``operator`` allocates on ``platform``, in order.

    Args:
        operator: the operator, as a dispatch mode below autograd receives it.
        args, kwargs: arguments of the call; only shapes, strides and types matter.
        outputs: the tensors that the call returned.
        platform: the GPU that it runs on.
    """
    rule = SCRATCH_RULES.get(operator)
    if rule is None:
        return ()
    return rule(Call(_named(operator, args, kwargs), outputs, platform))


def _named(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; the dispatcher omits those that equal their default, so these
    are added."""
    names, defaults = _parameters(operator)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _parameters(operator: OpOverload) -> tuple[list[str], dict[str, Any]]:
    arguments = schema(operator).arguments
    return [each.name for each in arguments], {
        each.name: each.default_value for each in arguments if each.has_default_value()
    }


def exactly(
    kind: str, *amounts_bytes: int, held: bool = True, after: int | None = None
) -> Scratches:
    """Return pieces whose exact sizes are known; none for an amount of 0."""
    return tuple(Scratch(each, each, kind, held, after) for each in amounts_bytes if each)


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


def round_up(amount: int, multiple: int) -> int:
    """Return ``amount``, rounded up to a multiple of ``multiple``."""
    return ceil_div(amount, multiple) * multiple
