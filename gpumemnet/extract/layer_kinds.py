"""The layer kind of a PyTorch module or function, in the vocabulary of :mod:`gpumemnet.job.layers`.

Modules are recognised by their PyTorch base class, so that a subclass counts as what it derives
from; the small norm and drop-path modules that every repository writes anew, by their class name;
functions by their name without underscores, so that ``F.relu``, ``torch.relu_`` and ``Tensor.relu``
are one.  Everything else is looked into, not named: a GELU written out keeps four tensors, the
module keeps one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from gpumemnet.job.layers import GROUP_OF_KIND

NOT_A_LAYER: Final = "not_a_layer"
"""Kind of calls that return their input, a view or a copy of it, or no activation."""

LOSS: Final = "loss"
"""Kind of a loss inside a model: part of the training step, not of the network."""


def _inverted(names_of_kind: dict[str, str]) -> dict[str, str]:
    return {name: kind for kind, names in names_of_kind.items() for name in names.split()}


_KIND_OF_WORD: Final = {kind.replace("_", ""): kind for kind in GROUP_OF_KIND}
_CLASSES_CALLED_AS_KINDS: Final = (
    "Linear Bilinear LayerNorm GroupNorm RMSNorm ReLU ReLU6 LeakyReLU PReLU RReLU ELU "
    "SELU CELU GELU SiLU Mish Softplus Tanh Sigmoid LogSigmoid Hardswish Hardsigmoid "
    "Hardtanh Softsign Tanhshrink Threshold LogSoftmax GLU Embedding EmbeddingBag "
    "Upsample"
)
_TORCH_CLASSES: Final = _inverted(
    {
        **{_KIND_OF_WORD[name.lower()]: name for name in _CLASSES_CALLED_AS_KINDS.split()},
        **{f"conv{d}d": f"Conv{d}d" for d in (1, 2, 3)},
        **{f"conv_transpose{d}d": f"ConvTranspose{d}d" for d in (1, 2, 3)},
        **{f"batch_norm{d}d": f"BatchNorm{d}d" for d in (1, 2, 3)},
        "batch_norm": "SyncBatchNorm",
        "instance_norm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d",
        "local_response_norm": "LocalResponseNorm CrossMapLRN2d",
        "activation": "Hardshrink Softshrink",
        "softmax": "Softmax Softmin Softmax2d",
        "dropout": "Dropout Dropout1d Dropout2d Dropout3d",
        "alpha_dropout": "AlphaDropout FeatureAlphaDropout",
        "max_pool": "MaxPool1d MaxPool2d MaxPool3d FractionalMaxPool2d FractionalMaxPool3d",
        "avg_pool": "AvgPool1d AvgPool2d AvgPool3d",
        "adaptive_avg_pool": "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d",
        "adaptive_max_pool": "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d",
        "lp_pool": "LPPool1d LPPool2d LPPool3d",
        "lstm": "LSTM LSTMCell",
        "gru": "GRU GRUCell",
        "rnn": "RNN RNNCell",
        "pad": " ".join(
            f"{mode}Pad{d}d"
            for mode in ("Constant", "Reflection", "Replication", "Circular")
            for d in (1, 2, 3)
        ),
        NOT_A_LAYER: "Identity Flatten Unflatten",
        LOSS: "_Loss",
    }
)

_OTHER_CLASSES: Final = _inverted(
    {
        "rms_norm": "rmsnorm t5layernorm",
        "layer_norm": "layernorm layernorm1d layernorm2d channellayernorm",
        "group_norm": "groupnorm",
        "batch_norm2d": "frozenbatchnorm2d",
        "drop_path": "droppath stochasticdepth dropconnect",
    }
)
"""Class names, in lower case without underscores, that the field uses for one thing only."""

_ACTIVATION_CLASSES: Final = _inverted(
    {
        "gelu": "gelu newgelu quickgelu fastgelu geluactivation newgeluactivation",
        "silu": "silu swish swishme",
        "relu": "relu",
        "mish": "mish mishme",
        "hardswish": "hardswish hswish hardswishme",
        "hardsigmoid": "hardsigmoid hsigmoid hardsigmoidme",
    }
)
"""The same for activations that show no function of PyTorch inside: those with a backward pass of
their own."""

_CLASS_ENDINGS: Final = {
    "rmsnorm": "rms_norm",
    "layernorm": "layer_norm",
    "groupnorm": "group_norm",
    "droppath": "drop_path",
}
"""Ends of such names, as in ``LlamaRMSNorm``."""

_FUNCTIONS_CALLED_AS_KINDS: Final = (
    "linear bilinear batch_norm instance_norm rms_norm local_response_norm relu relu6 "
    "leaky_relu prelu rrelu elu selu celu gelu silu mish softplus tanh hardswish "
    "hardsigmoid hardtanh softsign tanhshrink threshold log_softmax glu embedding "
    "embedding_bag pad"
)
_FUNCTIONS: Final = _inverted(
    {
        **{name: name for name in _FUNCTIONS_CALLED_AS_KINDS.split()},
        "matmul": "matmul rmatmul mm bmm mv addmm addmv addbmm baddbmm einsum tensordot inner",
        **{f"conv{d}d": f"conv{d}d" for d in (1, 2, 3)},
        **{f"conv_transpose{d}d": f"conv_transpose{d}d" for d in (1, 2, 3)},
        "layer_norm": "layer_norm native_layer_norm",
        "group_norm": "group_norm native_group_norm",
        "sigmoid": "sigmoid expit",
        "log_sigmoid": "logsigmoid",
        "activation": "hardshrink softshrink pow square abs erf log log2 log10 log1p sin cos clamp clip clamp_min clamp_max",
        "softmax": "softmax softmin gumbel_softmax",
        "dropout": "dropout dropout1d dropout2d dropout3d feature_dropout",
        "alpha_dropout": "alpha_dropout feature_alpha_dropout",
        "max_pool": " ".join(
            f"{p}max_pool{d}d{s}"
            for p in ("", "fractional_")
            for d in (1, 2, 3)
            for s in ("", "_with_indices")
        ),
        "avg_pool": "avg_pool1d avg_pool2d avg_pool3d",
        "adaptive_avg_pool": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        "adaptive_max_pool": " ".join(
            f"adaptive_max_pool{d}d{s}" for d in (1, 2, 3) for s in ("", "_with_indices")
        ),
        "lp_pool": "lp_pool1d lp_pool2d lp_pool3d",
        "attention": "scaled_dot_product_attention",
        "lstm": "lstm lstm_cell",
        "gru": "gru gru_cell",
        "rnn": "rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell",
        "add": "add radd iadd sub subtract rsub isub",
        "multiply": "mul multiply rmul imul div divide true_divide rdiv truediv rtruediv itruediv",
        "concatenate": "cat concat concatenate stack hstack vstack dstack",
        "upsample": "interpolate upsample upsample_bilinear upsample_nearest",
        LOSS: "cross_entropy linear_cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div",
        NOT_A_LAYER: (
            "get set getitem setitem len clone contiguous to type type_as detach requires_grad data float half bfloat16 double "
            "int long bool reshape reshape_as flatten unflatten view view_as expand expand_as repeat tile repeat_interleave copy "
            "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor "
            "normal uniform bernoulli zero fill checkpoint register_hook"
        ),
    }
)
"""Function names without leading and trailing underscores."""


def kind_of_module(module: nn.Module) -> str | None:
    """Return the kind of a module that is one layer; ``None`` for a module to look into."""
    if isinstance(module, torch.jit.ScriptModule):
        return "other"
    is_leaf = next(module.children(), None) is None
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn.") and cls.__name__ in _TORCH_CLASSES:
            kind = _TORCH_CLASSES[cls.__name__]
            # A norm with modules inside is a norm and an activation (timm's BatchNormAct2d): two
            # layers.
            return kind if is_leaf or GROUP_OF_KIND.get(kind) != "norm" else None
    if is_leaf:
        name = type(module).__name__.replace("_", "").lower()
        return _OTHER_CLASSES.get(name) or next(
            (kind for end, kind in _CLASS_ENDINGS.items() if name.endswith(end)), None
        )
    return None


def kind_with_number(kind: str, follows_product: bool) -> str:
    """Return the kind of a sum or product of an activation and a number, which keeps neither.

    Args:
        kind: ``add``, ``multiply``, or any other, which is returned.
        follows_product: whether a matrix product came before it: scores are scaled, and the layer
            list says so.
    """
    return "other" if kind == "add" or (kind == "multiply" and not follows_product) else kind


def kind_of_activation(module: nn.Module) -> str | None:
    """Return the kind of an activation by its class name, for a module in which no function of
    PyTorch is seen."""
    return _ACTIVATION_CLASSES.get(type(module).__name__.replace("_", "").lower())


def kind_of_function(name: str, output_dimensions: int) -> str | None:
    """Return the kind of a PyTorch function by its ``__name__``; ``None`` if it has none.

    Args:
        name: such as ``relu_`` or ``__rsub__``.
        output_dimensions: dimensions of its output, which tell the batch norms apart.
    """
    plain = name.strip("_")
    kind = _FUNCTIONS.get(plain)
    if kind == "batch_norm":
        return f"batch_norm{max(1, min(output_dimensions - 2, 3))}d"
    if kind is None and plain.endswith("_loss"):
        return LOSS
    return kind
