"""What operators do on CUDA and not on meta tensors, one module for each family of operators.

A family's module holds what its operators keep for the backward pass where that differs, and the
scratch memory that they take.  :func:`cuda_overrides` returns the operators to replace, for
:func:`~gpumemnet.tracing.operators.rules.overriding`; :func:`scratch` computes scratch memory;
:func:`~gpumemnet.tracing.operators.autocast.cuda_autocast` is the context in which autocast and
gradient scalers act; :data:`CORRECTIONS` lists every known difference: what happens on CUDA, where
the PyTorch source says so, and which module corrects it or what the trace gets wrong without a
correction.
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
from gpumemnet.tracing.operators.autocast import autocast_overrides, cuda_autocast
from gpumemnet.tracing.operators.cublas import blas_workspace
from gpumemnet.tracing.operators.rules import Call, Override, Rule, Scratch, overriding
from gpumemnet.tracing.options import Platform

__all__ = [
    "CORRECTIONS",
    "Correction",
    "NEGLECTED",
    "Override",
    "Scratch",
    "blas_workspace",
    "cuda_autocast",
    "cuda_overrides",
    "overriding",
    "scratch",
    "takes_scratch",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One difference.

    Attributes:
        name: name of the difference.
        on_cuda: what happens on CUDA and not on meta tensors.
        corrected_in: module that corrects it; ``None`` if there is none.
        effect: what remains wrong; empty if nothing does.
        concerns: parts of the names of the operators concerned; empty for all runs.
        source: file of PyTorch that shows it.
    """

    name: str
    on_cuda: str
    corrected_in: str | None = None
    effect: str = ""
    concerns: tuple[str, ...] = ()
    source: str

    def is_about(self, operators: Iterable[str]) -> bool:
        """Whether the difference concerns a run with these ``operators``."""
        return not self.concerns or any(
            part in operator for operator in operators for part in self.concerns
        )


_HERE: Final = "gpumemnet.tracing.operators"

CORRECTIONS: Final = (
    Correction(
        name="dropout",
        on_cuda="keeps a mask of one byte per element instead of noise in the input's type",
        corrected_in=f"{_HERE}.elementwise",
        source="aten/src/ATen/native/Dropout.cpp",
    ),
    Correction(
        name="gradient of mish",
        on_cuda="is one kernel",
        corrected_in=f"{_HERE}.elementwise",
        source="aten/src/ATen/native/Activation.cpp",
    ),
    Correction(
        name="attention kernel",
        on_cuda="runs the flash, memory-efficient or cuDNN kernel, by type, head size, mask and GPU, which keep no scores",
        corrected_in=f"{_HERE}.attention",
        source="aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
    ),
    Correction(
        name="attention: random state",
        on_cuda="keeps seed and offset of the memory-efficient kernel in host memory",
        corrected_in="gpumemnet.tracing.recorder",
        source="aten/src/ATen/native/transformers/cuda/attention.cu",
    ),
    Correction(
        name="flex attention, nested tensors, attention from other packages",
        on_cuda="runs kernels of their own",
        effect="calls that have no shapes on meta tensors stop the trace; flex attention that is not compiled keeps all scores",
        concerns=("flex_attention",),
        source="torch/nn/attention/flex_attention.py",
    ),
    Correction(
        name="autocast",
        on_cuda="casts by its lists, keeps the casts of weights until the region ends, and enters regions again in checkpoints",
        corrected_in=f"{_HERE}.autocast",
        source="aten/src/ATen/autocast_mode.h",
    ),
    Correction(
        name="gradient scaling",
        on_cuda="scales the loss, and skips a step whose gradients overflow",
        corrected_in=f"{_HERE}.autocast",
        effect="no step is ever skipped",
        concerns=("_amp_",),
        source="torch/amp/grad_scaler.py",
    ),
    Correction(
        name="sums of gradients",
        on_cuda="adds gradients of several consumers of a tensor in place",
        corrected_in=f"{_HERE}.elementwise",
        source="torch/csrc/autograd/input_buffer.cpp",
    ),
    Correction(
        name="in-place steps of composites",
        on_cuda="adds biases, attention masks and gradients of indexing in place",
        corrected_in=f"{_HERE}.elementwise",
        effect="other backward formulas with such a detour, those of norms for one, allocate one temporary tensor too many",
        concerns=("norm.", "linalg_vector_norm"),
        source="aten/src/ATen/TensorSubclassLikeUtils.h",
    ),
    Correction(
        name="batch norm",
        on_cuda="goes to cuDNN, which copies inputs that are not dense",
        corrected_in=f"{_HERE}.normalization",
        effect="cuDNN's workspace, and the reserve space that it keeps for channels-last inputs, are missing",
        concerns=("batch_norm",),
        source="aten/src/ATen/native/Normalization.cpp",
    ),
    Correction(
        name="RMS norm",
        on_cuda="runs one kernel that keeps its input and one value per row",
        corrected_in=f"{_HERE}.normalization",
        source="aten/src/ATen/native/layer_norm.cpp",
    ),
    Correction(
        name="softmax of float16 to float32",
        on_cuda="casts inside the kernel",
        corrected_in=f"{_HERE}.normalization",
        source="aten/src/ATen/native/SoftMax.cpp",
    ),
    Correction(
        name="LSTM and GRU",
        on_cuda="run in cuDNN, which keeps one reserve space",
        corrected_in=f"{_HERE}.recurrent",
        effect="the reserve space follows two sizes reported for cuDNN 7; workspaces and masks between layers are missing",
        concerns=("_cudnn_rnn", "lstm", "gru"),
        source="aten/src/ATen/native/cudnn/RNN.cpp",
    ),
    Correction(
        name="LSTM and GRU cells",
        on_cuda="run one fused kernel a step",
        corrected_in=f"{_HERE}.recurrent",
        source="aten/src/ATen/native/RNN.cpp",
    ),
    Correction(
        name="plain RNN, LSTM with projection",
        on_cuda="run in cuDNN, which keeps one reserve space",
        effect="the tensors of every step are counted instead",
        concerns=("rnn", "lstm"),
        source="aten/src/ATen/native/cudnn/RNN.cpp",
    ),
    Correction(
        name="weights of recurrent layers",
        on_cuda="lie in one buffer",
        effect="each is rounded up to an allocation of its own",
        concerns=("_cudnn_rnn", "rnn", "lstm", "gru"),
        source="torch/nn/modules/rnn.py",
    ),
    Correction(
        name="CTC loss",
        on_cuda="may run in cuDNN, which keeps the gradient",
        effect="the native kernel's tensors are counted instead",
        concerns=("ctc",),
        source="aten/src/ATen/native/LossCTC.cpp",
    ),
    Correction(
        name="layout of a convolution's result",
        on_cuda="is channels last if that of the input or of the weight is, and so are its gradients",
        corrected_in="gpumemnet.tracing.recorder",
        source="aten/src/ATen/native/Convolution.cpp",
    ),
    Correction(
        name="scratch memory inside kernels",
        on_cuda="many kernels allocate and free while they run",
        corrected_in=_HERE,
        source="aten/src/ATen/native/cuda",
    ),
    Correction(
        name="foreach and fused optimizers",
        on_cuda="are picked by default",
        corrected_in="gpumemnet.tracing.losses_and_optimizers",
        source="torch/optim/optimizer.py",
    ),
    Correction(
        name="torch.compile",
        on_cuda="fuses operators, and saves or recomputes what it chooses",
        effect="the model is traced as if it were not compiled",
        source="torch/_functorch/partitioners.py",
    ),
)
"""All known differences."""


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

NEGLECTED: Final[Mapping[str, str]] = {
    "cross-entropy, pooling, upsampling, dropout, cat": "no scratch, or a few bytes",
    "cumulative sums, top-k": "one state per block of threads; the sort of the result is small",
    "foreach and fused optimizers, gradient scaler": "lists of tensors travel as kernel arguments",
    "recurrent cuDNN layers": "cuDNN's workspace for them is not documented",
    "FFT, linear algebra, cuSPARSE": "their libraries' workspaces are not modelled",
    "nonzero, unique, boolean masks": "sizes depend on the data",
    "memory that cuDNN and cuBLAS allocate by themselves": "outside the allocator: it counts as context",
}
"""Sources of scratch memory that are not modelled → the reason."""


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
