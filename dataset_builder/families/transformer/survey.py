"""Lists the layers of a transformer in execution order, and counts its multiply-adds, without
torch.

With the math kernel, attention is the four steps that PyTorch computes (scores, softmax, dropout,
weighted sum), because each keeps a matrix of queries by keys.  With the other kernels, which keep
no such matrix, attention is one layer.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumemnet.job.layers import Layer

from .architecture import IMAGE_CHANNELS, TransformerArchitecture


class Survey:
    """Walks a transformer in execution order.

    Attributes:
        layers: the layers so far.
        multiply_adds: multiply-add operations of one forward pass per sample, the masked half of
            causal attention included.
    """

    def __init__(self, architecture: TransformerArchitecture) -> None:
        self.layers: list[Layer] = []
        self.multiply_adds = 0
        self._architecture = architecture
        if architecture.style == "vision":
            self._patches()
        else:
            self._tokens(architecture.sequence_length, architecture.vocabulary * architecture.width)
        if architecture.encoder_depth:
            self._stack(architecture.encoder_depth, architecture.sequence_length)
        if architecture.style == "encoder_decoder":
            self._tokens(architecture.target_length, 0)
            self._stack(
                architecture.decoder_depth, architecture.target_length, architecture.sequence_length
            )
        elif architecture.decoder_depth:
            self._stack(architecture.decoder_depth, architecture.sequence_length)
        self._head()

    def _add(self, kind: str, elements: int, parameters: int = 0) -> None:
        self.layers.append(Layer(kind, elements, parameters))

    def _linear(self, positions: int, inputs: int, outputs: int) -> None:
        weights = inputs * outputs
        self.multiply_adds += positions * weights
        self._add("linear", positions * outputs, weights + outputs * self._architecture.bias)

    def _norm(self, length: int) -> None:
        a = self._architecture
        biases = a.width if a.bias and a.norm == "layer_norm" else 0
        self._add(a.norm, length * a.width, a.width + biases)

    def _dropout(self, length: int) -> None:
        if self._architecture.dropout:
            self._add("dropout", length * self._architecture.width)

    def _tokens(self, length: int, parameters: int) -> None:
        self._add("embedding", length * self._architecture.width, parameters)
        self._positions(length)

    def _patches(self) -> None:
        a = self._architecture
        patches = a.sequence_length - 1
        weights = IMAGE_CHANNELS * a.patch_size**2 * a.width
        self.multiply_adds += patches * weights
        self._add("conv2d", patches * a.width, weights + a.width * a.bias)
        self._add("concatenate", a.sequence_length * a.width, a.width)
        self._positions(a.sequence_length)

    def _positions(self, length: int) -> None:
        elements = length * self._architecture.width
        if self._architecture.positions == "learned":
            self._add("positional_embedding", elements, elements)
        self._dropout(length)

    def _stack(self, depth: int, length: int, memory_length: int = 0) -> None:
        """``depth`` equal blocks: the layers of the first are repeated."""
        first, before = len(self.layers), self.multiply_adds
        self._branch(length, lambda: self._attention(length, length))
        if memory_length:
            self._branch(length, lambda: self._attention(length, memory_length, crosses=True))
        self._branch(length, lambda: self._feed_forward(length))
        self.layers += self.layers[first:] * (depth - 1)
        self.multiply_adds += (self.multiply_adds - before) * (depth - 1)
        if self._architecture.norm_position == "pre":
            self._norm(length)

    def _branch(self, length: int, inside: Callable[[], None]) -> None:
        pre = self._architecture.norm_position == "pre"
        if pre:
            self._norm(length)
        inside()
        self._dropout(length)
        self._add("add", length * self._architecture.width)
        if not pre:
            self._norm(length)

    def _attention(self, queries: int, keys: int, crosses: bool = False) -> None:
        a = self._architecture
        shared = a.key_value_heads * a.head_size
        if not a.fused_projection:
            self._linear(queries, a.width, a.width)
            self._linear(keys, a.width, shared)
            self._linear(keys, a.width, shared)
        elif crosses:
            self._linear(queries, a.width, a.width)
            self._linear(keys, a.width, 2 * shared)
        else:
            self._linear(queries, a.width, a.width + 2 * shared)
        if a.positions == "rotary" and not crosses:
            self._rotate(queries * a.width)
            self._rotate(keys * shared)
        self.multiply_adds += 2 * queries * keys * a.width
        if a.attention_kernel == "math":
            weights = a.heads * queries * keys
            self._add("matmul", weights)
            self._add("softmax", weights)
            if a.attention_dropout:
                self._add("dropout", weights)
            self._add("matmul", queries * a.width)
        else:
            self._add("attention" if queries == keys else "cross_attention", queries * a.width)
        self._linear(queries, a.width, a.width)

    def _rotate(self, elements: int) -> None:
        self._add("multiply", elements)
        self._add("other", elements // 2)
        self._add("concatenate", elements)
        self._add("multiply", elements)
        self._add("add", elements)

    def _feed_forward(self, length: int) -> None:
        a = self._architecture
        inner = length * a.feed_forward_width
        self._linear(length, a.width, a.feed_forward_width)
        self._add(a.activation, inner)
        if a.gated:
            self._linear(length, a.width, a.feed_forward_width)
            self._add("multiply", inner)
        self._linear(length, a.feed_forward_width, a.width)

    def _head(self) -> None:
        a = self._architecture
        if a.head == "classes":
            self._linear(1, a.width, a.classes)
            return
        weights = a.width * a.vocabulary
        self.multiply_adds += a.predicted_length * weights
        self._add("linear", a.predicted_length * a.vocabulary, 0 if a.head == "tied" else weights)
