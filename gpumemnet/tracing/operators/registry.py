"""The registry of operator families: which operators are replaced, which take scratch memory, and
what a trace still gets wrong.

A family's module holds what its operators keep for the backward pass where that differs, and the
scratch memory that they take.  :func:`cuda_overrides` returns the operators to replace, for
:func:`~gpumemnet.tracing.operators.rules.overriding`; :func:`scratch` computes scratch memory;
:func:`~gpumemnet.tracing.operators.autocast.cuda_autocast` is the context in which autocast and
gradient scalers act; :data:`KNOWN_DIFFERENCES` lists what remains wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from gpumemnet.torch_private.operators import OpOverload, schema
from gpumemnet.tracing.operators import (
    attention,
    convolution,
    cublas,
    elementwise,
    indexing,
    layouts,
    normalization,
    recurrent,
    reductions,
)
from gpumemnet.tracing.operators.autocast import autocast_overrides
from gpumemnet.tracing.operators.rules import Call, Override, Rule, Scratch
from gpumemnet.tracing.options import Platform


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between CUDA and meta tensors that a trace does not correct.

    Attributes:
        name: name of the difference.
        effect: what remains wrong.
        concerns: parts of the names of the operators concerned; empty for all runs.
    """

    name: str
    effect: str
    concerns: tuple[str, ...] = ()

    def is_about(self, operators: Iterable[str]) -> bool:
        """Whether the difference concerns a run with these ``operators``."""
        return not self.concerns or any(
            part in operator for operator in operators for part in self.concerns
        )


KNOWN_DIFFERENCES: Final = (
    # On CUDA: runs kernels of their own (torch/nn/attention/flex_attention.py).
    Difference(
        "flex attention, nested tensors, attention from other packages",
        "calls that have no shapes on meta tensors stop the trace; flex attention that is not compiled keeps all scores",
        ("flex_attention",),
    ),
    # On CUDA: scales the loss, and skips a step whose gradients overflow
    # (torch/amp/grad_scaler.py).
    Difference("gradient scaling", "no step is ever skipped", ("_amp_",)),
    # On CUDA: adds biases, attention masks and gradients of indexing in place
    # (aten/src/ATen/TensorSubclassLikeUtils.h).
    Difference(
        "in-place steps of composites",
        "other backward formulas with such a detour, those of norms for one, allocate one temporary tensor too many",
        ("norm.", "linalg_vector_norm"),
    ),
    # On CUDA: goes to cuDNN, which copies inputs that are not dense
    # (aten/src/ATen/native/Normalization.cpp).
    Difference(
        "batch norm",
        "cuDNN's workspace, and the reserve space that it keeps for channels-last inputs, are missing",
        ("batch_norm",),
    ),
    # On CUDA: run in cuDNN, which keeps one reserve space (aten/src/ATen/native/cudnn/RNN.cpp).
    Difference(
        "LSTM and GRU",
        "the reserve space follows two sizes reported for cuDNN 7; workspaces and masks between layers are missing",
        ("_cudnn_rnn", "lstm", "gru"),
    ),
    # On CUDA: run in cuDNN, which keeps one reserve space (aten/src/ATen/native/cudnn/RNN.cpp).
    Difference(
        "plain RNN, LSTM with projection",
        "the tensors of every step are counted instead",
        ("rnn", "lstm"),
    ),
    # On CUDA: lie in one buffer (torch/nn/modules/rnn.py).
    Difference(
        "weights of recurrent layers",
        "each is rounded up to an allocation of its own",
        ("_cudnn_rnn", "rnn", "lstm", "gru"),
    ),
    # On CUDA: may run in cuDNN, which keeps the gradient (aten/src/ATen/native/LossCTC.cpp).
    Difference("CTC loss", "the native kernel's tensors are counted instead", ("ctc",)),
    # On CUDA: fuses operators, and saves or recomputes what it chooses
    # (torch/_functorch/partitioners.py).
    Difference("torch.compile", "the model is traced as if it were not compiled"),
)
"""What a trace gets wrong, where nothing corrects it or not all of it."""


_FAMILIES: Final = (
    attention,
    convolution,
    cublas,
    indexing,
    layouts,
    normalization,
    recurrent,
    reductions,
)
_SCRATCH_RULES: Final[dict[Any, Rule]] = {
    operator: rule for family in _FAMILIES for operator, rule in family.SCRATCH_RULES.items()
}

# Not modelled:
# * cross-entropy, pooling, upsampling, dropout, cat: no scratch, or a few bytes.
# * cumulative sums, top-k: one state per block of threads; the sort of the result is small.
# * foreach and fused optimizers, gradient scaler: lists of tensors travel as kernel arguments.
# * recurrent cuDNN layers: cuDNN's workspace for them is not documented.
# * FFT, linear algebra, cuSPARSE: their libraries' workspaces are not modelled.
# * nonzero, unique, boolean masks: sizes depend on the data.
# * memory that cuDNN and cuBLAS allocate by themselves: outside the allocator: it counts as
#   context.


def takes_scratch(operator: OpOverload) -> bool:
    """Whether :func:`scratch` has a rule for ``operator``."""
    return operator in _SCRATCH_RULES


def scratch(
    operator: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Tensor],
    platform: Platform,
) -> tuple[Scratch, ...]:
    """Return the scratch memory that one call of ``operator`` allocates on ``platform``, in order.

    Args:
        operator: the operator, as a dispatch mode below autograd receives it.
        args, kwargs: arguments of the call; only shapes, strides and types matter.
        outputs: the tensors that the call returned.
        platform: the GPU that it runs on.
    """
    rule = _SCRATCH_RULES.get(operator)
    if rule is None:
        return ()
    return rule(Call(_named(operator, args, kwargs), outputs, platform))


def _named(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; the dispatcher omits those that equal their default, so these
    are added."""
    arguments = schema(operator).arguments
    named = {
        argument.name: argument.default_value
        for argument in arguments[len(args) :]
        if argument.has_default_value()
    }
    named.update(zip((argument.name for argument in arguments), args, strict=False))
    named.update(kwargs)
    return named


def cuda_overrides(platform: Platform) -> list[Override]:
    """Return all overrides, outermost first: autocast casts before any other kernel sees a tensor's
    type.

    Raises:
        InvalidRequestError: there is no such attention kernel.
    """
    return [
        *autocast_overrides(),
        *attention.attention_overrides(platform),
        *normalization.OVERRIDES,
        *recurrent.OVERRIDES,
        *elementwise.OVERRIDES,
    ]
