"""Element types and memory layouts: what a job's precision makes of inputs, weights and activations,
autocast's lists, and which tensors are channels last.

Sources: ``torch/amp/autocast_mode.py``; ``aten/src/ATen/autocast_mode.h`` and
``c10/core/MemoryFormat.h`` of PyTorch 2.11; NVIDIA, "Convolutional Layers User's Guide", tensor
layouts.  Autocast keeps weights, gradients and optimizer state in fp32, and caches a copy of the
weights in half precision.  The trace casts the tensors of each operator by autocast's lists.  The
closed form knows layers, not operators, and reads the lists of kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpumemnet.job.layers import LAYER_GROUPS

HALF_BYTES: Final = 2
FULL_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element under one precision.

    Attributes:
        inputs: of the input batch.
        weight: of weights, gradients and optimizer state.
        activation: of the outputs of most layers.
        weight_copy: of the copies that autocast makes of weights; 0 without autocast.
    """

    inputs: int
    weight: int
    activation: int
    weight_copy: int

    @property
    def is_autocast(self) -> bool:
        """Whether autocast is on."""
        return self.weight_copy > 0

    @property
    def uncast(self) -> int:
        """Bytes per element of outputs that autocast leaves alone or raises to fp32, the loss among
        them."""
        return FULL_BYTES if self.is_autocast else self.activation


ELEMENT_BYTES: Final[dict[str, ElementBytes]] = {
    "fp32": ElementBytes(4, 4, 4, 0),
    "tf32": ElementBytes(4, 4, 4, 0),
    "amp_fp16": ElementBytes(4, 4, 2, 2),
    "amp_bf16": ElementBytes(4, 4, 2, 2),
    "bf16": ElementBytes(2, 2, 2, 0),
}
"""Precision → bytes per element."""

AUTOCAST_TYPES: Final[dict[str, str]] = {"amp_fp16": "float16", "amp_bf16": "bfloat16"}
"""Precision → the type that autocast computes in, by its name in torch; only the precisions that
use autocast."""
MODEL_TYPES: Final[dict[str, str]] = {"bf16": "bfloat16"}
"""Precision → the type that the model and its inputs are converted to; only the precisions that
convert them."""
SCALED_PRECISIONS: Final = frozenset({"amp_fp16"})
"""Precisions that need a gradient scaler."""


LOWER_PRECISION: Final = (
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
)
"""Operators whose tensors are cast to the type of the region."""

FLOAT32: Final = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)
"""Operators whose tensors are cast to float32."""

FLOAT32_RESULT: Final = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
)
"""Operators with a result type of their own, which becomes float32 where the call gives none."""

FLOAT32_APPENDED: Final = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""Operators without a result type, and what runs instead, with one."""

PROMOTE: Final = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
)
"""Operators whose tensors are cast to the widest type among them."""

BANNED: Final = ("binary_cross_entropy",)
"""Operators that raise."""

LOWERED_KINDS: Final = frozenset(
    {
        *LAYER_GROUPS["linear"],
        *LAYER_GROUPS["conv"],
        *LAYER_GROUPS["attention"],
        *LAYER_GROUPS["recurrent"],
    }
)
"""Layer kinds that run in half precision, and whose inputs are cast to it: those of
:data:`LOWER_PRECISION`."""
RAISED_KINDS: Final = frozenset(
    {
        "layer_norm",
        "group_norm",
        "rms_norm",
        "softmax",
        "log_softmax",
        "softplus",
        *LAYER_GROUPS["embedding"],
    }
)
"""Layer kinds whose output is fp32: by :data:`FLOAT32` and :data:`FLOAT32_RESULT`, and embeddings,
which have fp32 weights."""
RAISED_INPUT_KINDS: Final = RAISED_KINDS - set(LAYER_GROUPS["embedding"])
"""Layer kinds whose input is cast to fp32."""
CAST_KINDS: Final = LOWERED_KINDS - set(LAYER_GROUPS["recurrent"])
"""Layer kinds whose weights autocast copies to half precision; norms and embeddings keep fp32
weights."""


CHANNELS_LAST_FORMATS: Final[dict[int, str]] = {4: "channels_last", 5: "channels_last_3d"}
"""Dimensions of a tensor → its channels-last format, by its name in torch.  Tensors of other
dimensions have none."""
IMAGE_DIMENSIONS: Final = 4
"""Dimensions of the tensors that the option ``channels_last`` converts: batches of images, and the
filters of 2D convolutions.

``Module.to(memory_format=torch.channels_last)`` converts no others.
"""

TENSOR_CORE_VECTOR_BYTES: Final = 16
"""Tensor cores read channels last, in multiples of this many bytes; operands in another layout are
copied."""
TF32_SMALLEST_CHANNELS: Final = 4
"""Fewest channels per group for which fp32 convolutions run on TF32 tensor cores."""
IMAGE_CHANNELS: Final = 3
"""Channels that the closed form takes an image to have, as photographs do; so TF32 tensor cores
take no first layer."""
_HALF_CHANNELS: Final = TENSOR_CORE_VECTOR_BYTES // HALF_BYTES
PADDED_IMAGE: Final = -(-IMAGE_CHANNELS // _HALF_CHANNELS) * _HALF_CHANNELS / IMAGE_CHANNELS
"""Elements of an image whose channels are padded for a kernel in half precision, as a multiple of
the image's."""
