"""The torch modules of a transformer, registered in the order in which they run.

Rotary tables are computed in every forward pass, as Hugging Face's Llama does, so a network holds
no buffers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .blocks import Blocks, activation_class, repeated
from .transformer import IMAGE_CHANNELS, TransformerArchitecture

_BACKENDS: Final = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_ROTARY_BASE: Final = 10_000.0


class Attention(nn.Module):
    """Multi-head attention of a sequence over itself or over a memory, with the architecture's
    kernel only.

    The kernel is chosen around each call, not around the training step, so that a block recomputed
    in the backward pass uses the same kernel.  The fused kernels exist only on CUDA; on other
    devices PyTorch chooses a kernel.
    """

    def __init__(
        self, architecture: TransformerArchitecture, *, crosses: bool, causal: bool
    ) -> None:
        super().__init__()
        a = architecture
        self.kernel, self.dropout, self.causal = a.attention_kernel, a.attention_dropout, causal
        self.head_size, self.group = a.head_size, a.heads // a.key_value_heads
        shared = a.key_value_heads * a.head_size
        if not a.fused_projection:
            self.splits = [[a.width], [shared], [shared]]
        elif crosses:
            self.splits = [[a.width], [shared, shared]]
        else:
            self.splits = [[a.width, shared, shared]]
        self.projections = nn.ModuleList(
            nn.Linear(a.width, sum(sizes), bias=a.bias) for sizes in self.splits
        )
        self.output = nn.Linear(a.width, a.width, bias=a.bias)

    def forward(
        self, features: Tensor, rotation: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """Attend.

        Args:
            features: ``[batch, queries, width]``.
            rotation: from :func:`rotation_table`, for queries and keys.
            memory: ``[batch, keys, width]`` to attend over; the features themselves unless given.

        Returns:
            ``[batch, queries, width]``.
        """
        sources = [features, *[features if memory is None else memory] * 2]
        parts = [
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection, source, sizes in zip(
                self.projections, sources, self.splits, strict=False
            )
            for part in projection(source).split(sizes, -1)
        ]
        query, key, value = parts
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        grouped = self.group > 1
        if (
            grouped and self.kernel == "memory_efficient"
        ):  # this kernel alone needs a key head for each query head
            key, value, grouped = (
                key.repeat_interleave(self.group, 1),
                value.repeat_interleave(self.group, 1),
                False,
            )
        with (
            sdpa_kernel(_BACKENDS[self.kernel])
            if query.is_cuda or self.kernel == "math"
            else nullcontext()
        ):
            attended = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=self.causal,
                enable_gqa=grouped,
            )
        return self.output(attended.transpose(1, 2).flatten(2))


def rotation_table(length: int, head_size: int, device: torch.device) -> Tensor:
    """Cosines and sines of the rotary angles, fp32, shape ``[2, length, head_size]`` (arXiv
    2104.09864, equation 34)."""
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = (
        torch.arange(length, device=device, dtype=torch.float32)[:, None] * _ROTARY_BASE**-exponents
    )
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """``[batch, heads, length, head_size]`` turned by the angles of ``rotation``, first half
    against second half."""
    cosines, sines = rotation.to(heads.dtype).unbind()
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, which a third one may gate."""

    def __init__(self, architecture: TransformerArchitecture) -> None:
        super().__init__()
        a = architecture
        self.inner = nn.Linear(a.width, a.feed_forward_width, bias=a.bias)
        self.activation = activation_class(a.activation)()
        self.gate = nn.Linear(a.width, a.feed_forward_width, bias=a.bias) if a.gated else None
        self.output = nn.Linear(a.feed_forward_width, a.width, bias=a.bias)

    def forward(self, features: Tensor) -> Tensor:
        """``[batch, length, width]`` from the same."""
        inner = self.activation(self.inner(features))
        if self.gate is not None:
            inner = inner * self.gate(features)
        return self.output(inner)


class Branch(nn.Module):
    """A residual branch with its dropout, and its norm before it or after the sum."""

    def __init__(self, architecture: TransformerArchitecture, inside: nn.Module) -> None:
        super().__init__()
        self.normed_first = architecture.norm_position == "pre"
        if self.normed_first:
            self.norm = norm(architecture)
        self.inside = inside
        self.dropout = dropout(architecture)
        if not self.normed_first:
            self.norm = norm(architecture)

    def forward(self, features: Tensor, *context: Tensor | None) -> Tensor:
        """``[batch, length, width]`` from the same; the inside is given ``context`` too."""
        inputs = self.norm(features) if self.normed_first else features
        features = features + self.dropout(self.inside(inputs, *context))
        return features if self.normed_first else self.norm(features)


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory, and feed-forward."""

    def __init__(
        self, architecture: TransformerArchitecture, *, causal: bool, crosses: bool
    ) -> None:
        super().__init__()
        self.attention = Branch(architecture, Attention(architecture, crosses=False, causal=causal))
        self.cross = (
            Branch(architecture, Attention(architecture, crosses=True, causal=False))
            if crosses
            else None
        )
        self.feed_forward = Branch(architecture, FeedForward(architecture))

    def forward(self, features: Tensor, rotation: Tensor | None, memory: Tensor | None) -> Tensor:
        """``[batch, length, width]`` from the same; see :meth:`Attention.forward`."""
        features = self.attention(features, rotation)
        if self.cross is not None:
            features = self.cross(features, None, memory)
        return self.feed_forward(features)


class Stack(nn.Module):
    """Positions, the blocks, and with norms before the branches one more at the end."""

    def __init__(
        self,
        architecture: TransformerArchitecture,
        depth: int,
        length: int,
        *,
        causal: bool,
        crosses: bool,
    ) -> None:
        super().__init__()
        a = architecture
        self.rotary_size = a.head_size if a.positions == "rotary" else 0
        learned = [LearnedPositions(length, a.width)] if a.positions == "learned" else []
        self.entry = nn.Sequential(*learned, dropout(a))
        self.blocks = Blocks(*repeated(lambda: Block(a, causal=causal, crosses=crosses), depth))
        self.norm = norm(a) if a.norm_position == "pre" else nn.Identity()

    def forward(self, features: Tensor, memory: Tensor | None = None) -> Tensor:
        """``[batch, length, width]`` from the same."""
        rotation = (
            rotation_table(features.shape[1], self.rotary_size, features.device)
            if self.rotary_size
            else None
        )
        return self.norm(self.blocks(self.entry(features), rotation, memory))


class LearnedPositions(nn.Module):
    """One learned vector per position, added."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(length, width))

    def forward(self, features: Tensor) -> Tensor:
        """``[batch, length, width]`` from the same."""
        return features + self.positions


class Patches(nn.Module):
    """Patches of an image as positions, the class token first."""

    def __init__(self, architecture: TransformerArchitecture) -> None:
        super().__init__()
        a = architecture
        self.projection = nn.Conv2d(
            IMAGE_CHANNELS, a.width, a.patch_size, stride=a.patch_size, bias=a.bias
        )
        self.token = ClassToken(a.width)

    def forward(self, images: Tensor) -> Tensor:
        """``[batch, 1 + patches, width]`` from ``[batch, channels, height, width]``."""
        return self.token(self.projection(images).flatten(2).transpose(1, 2))


class ClassToken(nn.Module):
    """A learned first position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, features: Tensor) -> Tensor:
        """``[batch, 1 + length, width]`` from ``[batch, length, width]``."""
        return torch.cat((self.token.expand(features.shape[0], -1, -1), features), 1)


class Transformer(nn.Module):
    """A whole network; see :func:`dataset_builder.families.transformer.build` for its inputs and
    outputs."""

    def __init__(self, architecture: TransformerArchitecture) -> None:
        super().__init__()
        a = architecture
        self.embedding = Patches(a) if a.style == "vision" else nn.Embedding(a.vocabulary, a.width)
        self.encoder = self.decoder = None
        if a.encoder_depth:
            self.encoder = Stack(a, a.encoder_depth, a.sequence_length, causal=False, crosses=False)
        if a.decoder_depth:
            length, crosses = a.target_length or a.sequence_length, a.encoder_depth > 0
            self.decoder = Stack(a, a.decoder_depth, length, causal=True, crosses=crosses)
        self.classifies = a.head == "classes"
        self.head: nn.Module | None = None
        if self.classifies:
            self.head = nn.Linear(a.width, a.classes, bias=a.bias)
        elif a.head == "untied":
            self.head = nn.Linear(a.width, a.vocabulary, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits from tokens ``[batch, length]`` or images, and from the tokens of the target where
        the style has one."""
        features = self.embedding(inputs)
        memory = None
        if self.encoder is not None:
            features = memory = self.encoder(features)
        if self.decoder is not None:
            features = self.decoder(
                features if targets is None else self.embedding(targets), memory
            )
        if self.classifies:
            features = features[:, 0]
        if (
            self.head is None
        ):  # tied: a separate module would hold the embedding's weights a second time
            return functional.linear(features, self.embedding.get_parameter("weight"))
        return self.head(features)


def norm(architecture: TransformerArchitecture) -> nn.Module:
    """A norm over the width."""
    if architecture.norm == "rms_norm":
        return nn.RMSNorm(architecture.width)
    return nn.LayerNorm(architecture.width, bias=architecture.bias)


def dropout(architecture: TransformerArchitecture) -> nn.Module:
    """Dropout, if the architecture has any."""
    return nn.Dropout(architecture.dropout) if architecture.dropout else nn.Identity()
