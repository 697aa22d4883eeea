"""LSTM and GRU: replaced on meta tensors by operators that allocate as CUDA does.

On CUDA, cuDNN runs a whole stack of layers in one call, and a fused kernel runs a single cell.  On
meta tensors PyTorch composes both from many small operators.

cuDNN keeps what its backward pass needs in one opaque buffer, the reserve space
(:func:`gpumemnet.physics.saved_tensors.reserve_elements`).

Sources: ``aten/src/ATen/native/RNN.cpp``, ``aten/src/ATen/native/cudnn/RNN.cpp`` and
``aten/src/ATen/cudnn/AutocastRNN.cpp``.  Stacks of plain RNN layers, and of LSTM layers with a
projection, are not replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gpumemnet.physics.saved_tensors import reserve_elements
from gpumemnet.torch_private.names import (
    Function,
    aten,
)
from gpumemnet.tracing.operators.reductions import accumulator_bytes, reduction_scratch
from gpumemnet.tracing.operators.rules import (
    OVERRIDES,
    SCRATCH_RULES,
    Call,
    Scratches,
    exactly,
)

_GRU_WORKSPACE: Final = 5
"""``GRU_WORKSPACE_MULTIPLIER`` of ``aten/src/ATen/native/cuda/RNN.cu``."""

_CUDNN_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _layers(
    kind: str,
    original: Function,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Tensor | None = None,
) -> Any:
    """Run the layers of a batch of samples of equal length, or of samples that are packed by their
    lengths."""
    if not _cudnn_takes(input, hx):
        arguments = (hx, params, has_biases, num_layers, dropout, train, bidirectional)
        if batch_sizes is None:
            return original(input, *arguments, batch_first)
        return original(input, batch_sizes, *arguments)
    hidden = _states(hx)
    directions = 2 if bidirectional else 1
    samples, units = hidden[0].shape[1:]
    weights_dtype = None
    if torch.is_autocast_enabled("cuda"):
        weights_dtype = torch.get_autocast_dtype("cuda")
        input, *hidden = (tensor.to(weights_dtype) for tensor in (input, *hidden))
    steps = input.shape[0] * input.shape[1] if batch_sizes is None else len(batch_sizes) * samples
    reserve = (
        reserve_elements(kind, steps=steps, hidden=units, layers=num_layers, directions=directions)
        if train
        else 0
    )
    stack = _CudnnStack(
        batch_first, len(hidden), directions * units, reserve * input.element_size(), weights_dtype
    )
    return _CudnnRnn.apply(stack, input, *hidden, *params)  # type: ignore[no-untyped-call]


def _packed_layers(
    kind: str, original: Function, data: Tensor, batch_sizes: Tensor, *arguments: Any
) -> Any:
    return _layers(  # type: ignore[misc]  # of the arguments, all but the last two are given
        kind, original, data, *arguments, batch_first=False, batch_sizes=batch_sizes
    )


def _states(hx: Any) -> Sequence[Tensor]:
    """Return the states as a sequence: a GRU has one tensor, an LSTM two."""
    return (hx,) if isinstance(hx, Tensor) else hx


def _cudnn_takes(input: Tensor, hx: Any) -> bool:
    """Whether cuDNN runs the layers; it knows no LSTM with a projection."""
    is_known = torch.backends.cudnn.enabled and input.dtype in _CUDNN_TYPES and input.numel() > 0
    return is_known and len({state.shape[2] for state in _states(hx)}) == 1


class _CudnnStack(NamedTuple):
    batch_first: bool
    states: int
    width: int
    reserve_bytes: int
    weights_dtype: torch.dtype | None

    def dense(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the layout that cuDNN reads: contiguous, with the steps as the first
        dimension."""
        return (tensor.transpose(0, 1) if self.batch_first else tensor).contiguous()


class _CudnnRnn(torch.autograd.Function):
    """The operator ``_cudnn_rnn``, which saves input, weights, initial states, output and the
    reserve space."""

    @staticmethod
    def forward(
        ctx: Any, stack: _CudnnStack, input: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, weights = tensors[: stack.states], tensors[stack.states :]
        # Autocast copies the weights into a flat buffer of the lower type; otherwise they already
        # share one.
        elements = sum(weight.numel() for weight in weights)
        flat = (
            None
            if stack.weights_dtype is None
            else input.new_empty(elements, dtype=stack.weights_dtype)
        )
        dense = stack.dense(input)
        output = dense.new_empty((*input.shape[:-1], stack.width))
        last = [state.new_empty(state.shape) for state in hidden]
        space = input.new_empty(stack.reserve_bytes, dtype=torch.uint8)
        ctx.stack = stack
        ctx.save_for_backward(input, *hidden, *weights, output, space, flat)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stack: _CudnnStack = ctx.stack
        input, *rest = ctx.saved_tensors
        hidden, weights, flat = rest[: stack.states], rest[stack.states : -3], rest[-1]
        needed = ctx.needs_input_grad[1:]
        found = [*_input_gradients(stack, input, hidden, gradients[0])]
        if any(needed[len(found) :]):
            found += _weight_gradients(stack, input, weights, weights[0] if flat is None else flat)
        return None, *(
            grad if is_needed else None for grad, is_needed in zip_longest(found, needed)
        )


def _input_gradients(
    stack: _CudnnStack, input: Tensor, hidden: Sequence[Tensor], gradient: Tensor
) -> Iterator[Tensor]:
    copies = stack.dense(input), stack.dense(gradient)
    yield input.new_empty(input.shape)
    for state in hidden:
        yield state.new_empty(state.shape)
    del copies


def _weight_gradients(
    stack: _CudnnStack, input: Tensor, weights: Sequence[Tensor], like: Tensor
) -> list[Tensor]:
    copy = stack.dense(input)
    sizes = [weight.numel() for weight in weights]
    pieces = torch.split(like.new_zeros(sum(sizes)), sizes)
    del copy
    return [
        piece.view(weight.shape).to(weight.dtype)
        for piece, weight in zip(pieces, weights, strict=True)
    ]


def _lstm_cell(
    original: Function,
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gates = aten.matmul(input, w_ih.t()), aten.matmul(hx[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return hy, cy


def _gru_cell(
    original: Function,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    gates = aten.matmul(input, w_ih.t()), aten.matmul(hx, w_hh.t())
    return _FusedGruCell.apply(*gates, hx, b_ih, b_hh)  # type: ignore[no-untyped-call]


class _FusedGruCell(torch.autograd.Function):
    """The operator ``_thnn_fused_gru_cell``, which PyTorch does not support on meta tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        input_gates: Tensor,
        hidden_gates: Tensor,
        hx: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> Tensor:
        workspace = hx.new_empty((hx.shape[0], _GRU_WORKSPACE * hx.shape[1]))
        ctx.save_for_backward(input_gates, hidden_gates, hx, b_ih, b_hh, workspace)
        return torch.empty_like(hx)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input_gates, hidden_gates, hx, b_ih, b_hh, _ = ctx.saved_tensors
        of_input, of_hidden, of_state = map(torch.empty_like, (input_gates, hidden_gates, hx))
        of_biases = [
            None if bias is None else gates.sum(0)
            for bias, gates in ((b_ih, of_input), (b_hh, of_hidden))
        ]
        return of_input, of_hidden, of_state, *of_biases


def _ctc_loss(
    original: Function,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int] | Tensor,
    target_lengths: Sequence[int] | Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    batch = log_probs.shape[1] if log_probs.ndim == 3 else 1
    if not isinstance(target_lengths, Tensor):
        longest = max(target_lengths, default=0)
    elif target_lengths.is_meta:
        longest = targets.shape[1] if targets.ndim > 1 else targets.numel() // batch
    else:
        longest = int(target_lengths.max())
    return _CtcLoss.apply(log_probs, batch, longest, zero_infinity)  # type: ignore[no-untyped-call]


class _CtcLoss(torch.autograd.Function):
    """The operator ``_ctc_loss``, which PyTorch does not support on meta tensors: losses of the
    batch, and logarithms of a probability for each step, target and blank
    (``native/cuda/LossCTC.cu``)."""

    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, batch: int, longest: int, zero_infinity: bool
    ) -> tuple[Tensor, Tensor]:
        log_alpha = log_probs.new_empty((batch, log_probs.shape[0], 2 * longest + 1))
        losses = log_probs.new_empty((batch,) if log_probs.ndim == 3 else ())
        ctx.save_for_backward(log_probs, losses, log_alpha)
        ctx.zero_infinity = zero_infinity
        ctx.mark_non_differentiable(log_alpha)
        return losses, log_alpha

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, losses, log_alpha = ctx.saved_tensors
        log_beta = torch.empty_like(log_alpha)
        gradient = torch.empty_like(log_probs)
        del log_beta
        if ctx.zero_infinity:
            gradient = torch.where(losses[..., None] == 0, 0, gradient)
        return gradient, None, None, None


OVERRIDES.update(
    {
        aten._ctc_loss.default: _ctc_loss,
        aten._ctc_loss.Tensor: _ctc_loss,
        aten.lstm.input: partial(_layers, "lstm"),
        aten.lstm.data: partial(_packed_layers, "lstm"),
        aten.gru.input: partial(_layers, "gru"),
        aten.gru.data: partial(_packed_layers, "gru"),
        aten.lstm_cell.default: _lstm_cell,
        aten.gru_cell.default: _gru_cell,
    }
)


def _packed(call: Call) -> Scratches:
    """Return the copies of the steps before they are joined (``_pack_padded_sequence`` in
    ``native/PackedSequence.cpp``)."""
    return exactly("copy", call.outputs[0].nbytes, after=0)


def _bias_gradient(call: Call) -> Scratches:
    """What summing the gradients of the gates takes."""
    gates = call.outputs[0]
    return reduction_scratch(gates, [0], accumulator_bytes(gates.dtype), call.platform)


SCRATCH_RULES.update(
    {
        aten._pack_padded_sequence.default: _packed,
        aten._thnn_fused_lstm_cell_backward_impl.default: _bias_gradient,
    }
)
