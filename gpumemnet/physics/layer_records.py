"""Records of the layers of a job, and of what is known of their kinds: fields that the compiled
modules read by name.

Cython compiles this module with the types of ``layer_records.pxd``; there a record is a C
structure.  Without a compiler it runs as it is.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

from gpumemnet.job.layers import GROUP_NAMES, GROUP_OF_KIND, KINDS
from gpumemnet.physics.saved_tensors import KIND_RULES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    MutableNumbers = MutableSequence[float] | NDArray[np.float64]
    Numbers = Sequence[float] | NDArray[np.float64]
    Codes = Sequence[int] | NDArray[np.int64]

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""


class LayerKind:
    """What is known of one kind of layer: the fields of
    :class:`gpumemnet.physics.saved_tensors.KindRule`, and these.

    Attributes:
        group: position of its group in :data:`gpumemnet.job.layers.GROUP_NAMES`.
        is_attention: one kernel for the whole attention (scores, softmax and weighted sum).
        computes_attention: such a kernel, or the softmax of attention in single steps.
        reads_scores: computes with attention scores.
        reads_projections: reads queries, keys and values.
        starts_block: begins a block where the job has no residual sums.
    """

    __slots__ = (
        *(
            "group",
            "is_alias",
            "saves_input",
            "saves_output",
            "mask_bytes",
            "statistics",
            "second_share",
            "has_bias",
            "is_cast",
        ),
        *(
            "autocast_output_bytes",
            "autocast_input_bytes",
            "is_attention",
            "is_embedding",
            "is_convolution",
            "is_norm",
            "is_add",
        ),
        *(
            "is_average_pool",
            "is_concatenate",
            "is_conv2d",
            "is_dropout",
            "is_linear",
            "is_matmul",
            "is_multiply",
            "is_rms_norm",
        ),
        "is_softmax",
        *("computes_attention", "reads_scores", "reads_projections", "starts_block"),
    )

    def __init__(self, name: str) -> None:
        """Looks up the kind ``name`` in the tables of :mod:`gpumemnet.physics.saved_tensors`."""
        rule, group = KIND_RULES[name], GROUP_OF_KIND[name]
        self.group = GROUP_NAMES.index(group)
        self.is_alias, self.saves_input, self.saves_output = (
            rule.is_alias,
            rule.saves_input,
            rule.saves_output,
        )
        self.mask_bytes, self.statistics, self.second_share = (
            rule.mask_bytes,
            rule.statistics,
            rule.second_share,
        )
        self.has_bias, self.is_cast = rule.has_bias, rule.is_cast
        self.autocast_output_bytes, self.autocast_input_bytes = (
            rule.autocast_output_bytes,
            rule.autocast_input_bytes,
        )
        self.is_attention = group == "attention"
        self.is_embedding = group == "embedding"
        self.is_convolution = group == "conv"
        self.is_norm = group == "norm"
        self.is_add = name == "add"
        self.is_average_pool = name == "avg_pool"
        self.is_concatenate = name == "concatenate"
        self.is_conv2d = name == "conv2d"
        self.is_dropout = name == "dropout"
        self.is_linear = name == "linear"
        self.is_matmul = name == "matmul"
        self.is_multiply = name == "multiply"
        self.is_rms_norm = name == "rms_norm"
        self.is_softmax = name == "softmax"
        self.computes_attention = group == "attention" or name == "softmax"
        self.reads_scores = group == "attention" or name in ("softmax", "matmul")
        self.reads_projections = group == "attention" or name == "matmul"
        self.starts_block = group in ("linear", "conv")


LAYER_KINDS: Final = [LayerKind(kind) for kind in KINDS]
"""The kinds in the order of their codes (:data:`gpumemnet.job.layers.CODE_OF_KIND`)."""


class Layer:
    """One layer of a job.

    Attributes:
        kind: what is known of its kind.
        activations: output elements per sample.
        parameters: parameter elements.
        is_constant_product, is_inner_sum, is_passed_on, begins_block, is_in_block,
        is_decomposed_norm, is_sibling, is_depthwise:
            its roles, see :mod:`gpumemnet.physics.layer_roles`.
        is_recomputed: lies in a block whose activations are recomputed in the backward pass.
        has_backward: it or a layer before it is trained, so the backward pass runs through it.
        is_output_kept: the backward pass keeps its output, for this layer or for the next.
        element_bytes: bytes per element of its output.
        input_element_bytes: bytes per element of its input as the kernel reads it, so after a cast.
        elements: output elements of the whole batch.
        output_bytes, output_class, output_cost: its output; the class is one of
            :data:`gpumemnet.physics.closed_form.BLOCK_CLASSES`, the cost the bytes of segment.
        weight_class, weight_cost: its weight.
        second_class, second_cost: its second parameter (a bias, or the shift of a norm).
        second_elements: of that parameter; 0 if there is none.
    """

    __slots__ = (
        *("kind", "activations", "parameters"),
        *(
            "is_constant_product",
            "is_inner_sum",
            "is_passed_on",
            "begins_block",
            "is_in_block",
            "is_decomposed_norm",
        ),
        *(
            "is_sibling",
            "is_depthwise",
            "is_recomputed",
            "has_backward",
            "is_output_kept",
            "element_bytes",
        ),
        *("input_element_bytes", "elements", "output_bytes", "output_class", "output_cost"),
        *("weight_class", "weight_cost", "second_class", "second_cost", "second_elements"),
    )

    def describe(self, kind: LayerKind, activations: float, parameters: float) -> None:
        """Makes this the record of a layer of which nothing else is known yet."""
        self.kind = kind
        self.activations = activations
        self.parameters = parameters
        self.is_constant_product = self.is_inner_sum = self.is_passed_on = self.begins_block = (
            self.is_in_block
        ) = False
        self.is_decomposed_norm = self.is_sibling = self.is_depthwise = False
        self.is_recomputed = self.has_backward = self.is_output_kept = False
        self.element_bytes = self.input_element_bytes = 0.0
        self.elements = self.output_bytes = self.output_cost = 0.0
        self.weight_cost = self.second_cost = self.second_elements = 0.0
        self.output_class = self.weight_class = self.second_class = 0
