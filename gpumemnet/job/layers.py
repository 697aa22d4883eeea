"""One layer of a network: its kind, its output elements per sample, and its parameter elements.

GPUMemNet describes layers by the same three values (arXiv 2602.17817, section 4: layer type,
activations, parameters). Unknown kinds are valid and count in the group ``other``, so a new PyTorch
layer never makes a job invalid.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

from gpumemnet.atomic_files import shipped_json
from gpumemnet.errors import InvalidJobError, InvalidRequestError

MAX_LAYERS: Final = 20_000
"""Most layers of one job."""

MAX_ELEMENTS: Final = 2**50
"""Upper limit of every count in a job (2**50 elements are four pebibytes in fp32)."""

_KIND_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")

KIND_TABLE: Final[dict[str, dict[str, dict[str, Any]]]] = shipped_json("job/layer_kinds.json")
"""Layer group → its kinds, each with the fields of its
:class:`~gpumemnet.physics.saved_tensors.KindRule` that are not as usual."""
LAYER_GROUPS: Final = {group: tuple(kinds) for group, kinds in KIND_TABLE.items()}
"""Layer group → its kinds.  Features are computed per group, so the groups are part of the feature
schema."""

GROUP_NAMES: Final = tuple(LAYER_GROUPS)
GROUP_OF_KIND: Final = {kind: group for group, kinds in LAYER_GROUPS.items() for kind in kinds}
KINDS: Final = tuple(GROUP_OF_KIND)
CODE_OF_KIND: Final = {kind: code for code, kind in enumerate(KINDS)}
OTHER_CODE: Final = CODE_OF_KIND["other"]


def check_count(value: object, field: str, minimum: int = 0, maximum: int = MAX_ELEMENTS) -> int:
    """Returns ``value`` as an ``int`` between ``minimum`` and ``maximum``; refuses booleans, floats
    and strings.

    Raises:
        InvalidJobError: names ``field`` and the allowed range.
    """
    if (
        type(value) is not int
    ):  # the common case takes one comparison: this runs for every layer of every request
        try:
            value = operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]  # numpy integers pass
        except TypeError:
            raise InvalidJobError(f"must be a whole number, not {describe(value)}", field) from None
    if not minimum <= value <= maximum:
        raise InvalidJobError(
            f"must be between {minimum} and {maximum}, not {describe(value)}", field
        )
    return value


def check_choice(value: object, choices: Iterable[object], field: str) -> str:
    """Returns ``value`` if it is one of the choices.

    Raises:
        InvalidRequestError: names ``field`` and the choices.
    """
    names = [str(choice) for choice in choices]
    if not isinstance(value, str) or value not in names:
        raise InvalidRequestError(
            f"must be one of {', '.join(names)}, not {describe(value)}", field
        )
    return value


def describe(value: object) -> str:
    """Describes ``value`` for an error message: short, on one line; objects and lists by their JSON
    type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**24:
        return "a number of more than 24 digits"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_kind(value: object) -> bool:
    """Whether ``value`` is a valid layer kind, known or unknown."""
    return isinstance(value, str) and (
        value in GROUP_OF_KIND or _KIND_PATTERN.match(value) is not None
    )


UNKNOWN: Final = -1
"""In columns of ``trains`` and ``block``: the layer does not state it."""


class _Fields(NamedTuple):
    kind: str
    activations: int
    parameters: int = 0
    trains: bool | None = None
    block: int | None = None


class Layer(_Fields):
    """One executed layer.  It is a named tuple, so lists of layers convert to columns without a
    loop.

    Attributes:
        kind: lower-case name of the layer type, see :data:`LAYER_GROUPS`.
        activations: output elements per sample.
        parameters: elements of the layer's parameters; parameters of a shared layer count at its
            first execution only.
        trains: whether a parameter that it uses receives gradients, false for a layer without
            parameters; ``None`` where it is unknown.
        block: number, from 1 in execution order, of the block of layers that activation
            checkpointing recomputes together; 0 outside of all blocks; ``None`` where it is
            unknown.

    Raises:
        InvalidJobError: when the kind is malformed, a count is negative, too large or not an
            integer, or ``trains`` is neither true nor false.
    """

    __slots__ = ()

    def __new__(
        cls,
        kind: str,
        activations: int,
        parameters: int = 0,
        trains: bool | None = None,
        block: int | None = None,
    ) -> Layer:
        """Creates a layer after checking its values."""
        if not is_kind(kind):
            raise InvalidJobError(
                f"must be a lower-case layer kind such as 'linear' or 'conv2d', not {describe(kind)}",
                "kind",
            )
        if type(activations) is not int or not 0 <= activations <= MAX_ELEMENTS:
            activations = check_count(activations, "activations")
        if type(parameters) is not int or not 0 <= parameters <= MAX_ELEMENTS:
            parameters = check_count(parameters, "parameters")
        if not isinstance(trains, bool | None):
            raise InvalidJobError(
                f"must be true or false, or null where it is unknown, not {describe(trains)}",
                "trains",
            )
        if block is not None:
            block = check_count(block, "block", 0, MAX_LAYERS)
        return tuple.__new__(cls, (kind, activations, parameters, trains, block))

    @property
    def group(self) -> str:
        """The layer group of this kind."""
        return GROUP_OF_KIND.get(self.kind, "other")


def unchecked_layers(
    kinds: Iterable[str],
    activations: Iterable[int],
    parameters: Iterable[int],
    trains: Iterable[bool | None],
    blocks: Iterable[int | None],
) -> tuple[Layer, ...]:
    """Layers from columns that are known to be valid, much faster than one by one."""
    columns = zip(kinds, activations, parameters, trains, blocks, strict=True)
    return tuple(map(tuple.__new__, repeat(Layer), columns))
