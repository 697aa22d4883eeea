"""Operators, blocks and networks: what a named model executes.

A network is a list of sections: the embeddings, some equal blocks, and the head with its loss.  An
operator states its kind (:data:`gpumemnet.job.layers.LAYER_GROUPS`), its inputs, the elements of
its output for one sample, and its parameters.  The operators are those that the modules of
``transformers`` execute; a test compares them with what :mod:`gpumemnet.extract` sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpumemnet.errors import InvalidRequestError

HEAD: Final = "Head"
"""Name of the last section, which has the logits and the loss."""
EMBEDDINGS: Final = "Embeddings"
"""Name of the section that embeds the words."""
MAX_SIZE: Final = 2**40
"""Largest size that a configuration may state."""
OLD_GELU: Final = "gelu_new"
"""Kind of GPT-2's activation."""
IN_PLACE: Final = "in_place"
"""Kind of an activation that overwrites its input, and keeps its result."""
BLOCK_INPUT: Final = -1
"""Number of the tensor that a block is given."""
OUTER_INPUT: Final = -2
"""Number of a tensor from outside of the block that is the same for all of them: what an encoder
gives to a decoder."""

Config = Mapping[str, Any]
"""A ``config.json``, or a part of it."""


class Operator(NamedTuple):
    """One operator of a block.

    Attributes:
        kind: a layer kind, or ``rotary`` and ``loss``.
        name: the module's name within its block.
        inputs: positions of the operators whose outputs it reads.
        elements: output elements of one sample.
        parameters: elements of its parameters.
        rows: vectors of one sample that a linear layer multiplies, or queries of an attention.
        width: elements of a vector that a linear layer reads, or of an attention's head.
        heads: query heads of an attention.
        copies: equal weights of this operator, as an expert's; each row passes one of them.
    """

    kind: str
    name: str
    inputs: tuple[int, ...]
    elements: int
    parameters: int = 0
    rows: int = 0
    width: int = 0
    heads: int = 0
    copies: int = 1


@dataclass
class Section:
    """Equal blocks of a network.

    Attributes:
        name: what it is called: the class of the block.
        count: how many of these blocks follow each other.
        input_elements: of the tensor that a block is given, for one sample.
        operators: of one block.
        is_checkpointed: whether gradient checkpointing recomputes these blocks.
    """

    name: str
    count: int
    input_elements: int = 0
    operators: list[Operator] = field(default_factory=list)
    is_checkpointed: bool = True

    @property
    def parameters(self) -> int:
        """Parameter elements of all its blocks."""
        return self.count * sum(each.parameters for each in self.operators)

    def add(
        self, kind: str, inputs: tuple[int, ...] | int, elements: int, name: str = "", **values: int
    ) -> int:
        """Adds an operator, and returns its number."""
        read = (inputs,) if isinstance(inputs, int) else inputs
        self.operators.append(Operator(kind, name, read, elements, **values))
        return len(self.operators) - 1

    def linear(
        self,
        source: int,
        rows: int,
        sizes: tuple[int, int],
        name: str,
        bias: bool = False,
        copies: int = 1,
    ) -> int:
        """Adds a linear layer from ``sizes[0]`` to ``sizes[1]`` features."""
        parameters = copies * (sizes[0] * sizes[1] + (sizes[1] if bias else 0))
        return self.add(
            "linear",
            source,
            rows * sizes[1],
            name,
            parameters=parameters,
            rows=rows,
            width=sizes[0],
            copies=copies,
        )


@dataclass(frozen=True)
class Network:
    """A model at one length of its sequences or size of its images.

    Attributes:
        sections: in the order of the forward pass.
        tied_parameters: parameters of the head that are those of the embedding.
        is_causal: whether attention reads earlier positions only.
        recomputes: whether its library can recompute blocks.
    """

    sections: tuple[Section, ...]
    tied_parameters: int = 0
    is_causal: bool = True
    recomputes: bool = True

    @property
    def parameters(self) -> int:
        """Parameter elements, each counted once."""
        return sum(section.parameters for section in self.sections) - self.tied_parameters


def count_of(config: Config, *names: str, default: int | None = None) -> int:
    """The first of these counts that the configuration states; 0 counts as not stated."""
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value <= MAX_SIZE:
            return value
        if value is not None and value != 0:
            raise InvalidRequestError(
                f"the configuration states {name} as no number from 1 to 2**40", "model"
            )
    if default is None:
        raise InvalidRequestError(f"the configuration does not state {names[0]}", "model")
    return default
