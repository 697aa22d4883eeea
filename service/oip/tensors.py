"""Converts the protocol's tensors from and to JSON and raw bytes.

In raw form (Triton's extension ``binary_tensor_data``) numbers are little-endian and row-major, and
a boolean is one byte. An element of type BYTES is its length in four bytes, followed by its
content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError

LENGTH_BYTES: Final = 4
_NUMPY_TYPES: Final = {"BOOL": "u1", "INT32": "<i4", "INT64": "<i8", "FP64": "<f8"}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One output: its values are strings for the data type BYTES, and an array of the tensor's
    shape for all others."""

    name: str
    datatype: str
    values: NDArray[Any] | Sequence[str]

    @property
    def shape(self) -> list[int]:
        """Size of every dimension."""
        return (
            list(self.values.shape) if isinstance(self.values, np.ndarray) else [len(self.values)]
        )

    def as_json(self) -> NDArray[Any] | Sequence[str]:
        """The elements as a flat list, as orjson writes them."""
        return self.values.ravel() if isinstance(self.values, np.ndarray) else self.values

    def as_bytes(self) -> bytes:
        """The elements in raw form."""
        if isinstance(self.values, np.ndarray):
            return self.values.astype(_NUMPY_TYPES[self.datatype]).tobytes()
        return join_bytes([text.encode() for text in self.values])


def join_bytes(elements: Sequence[bytes]) -> bytes:
    """A BYTES tensor in raw form."""
    return b"".join(
        [len(element).to_bytes(LENGTH_BYTES, "little") + element for element in elements]
    )


def split_bytes(raw: bytes, path: str) -> list[bytes]:
    """The elements of a BYTES tensor in raw form.

    Raises:
        InvalidRequestError: at ``path``, when an element is longer than the remaining bytes.
    """
    elements: list[bytes] = []
    at = 0
    while at < len(raw):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        if at > len(raw):
            raise InvalidRequestError(
                f"ends within element {len(elements)}: each is its length in {LENGTH_BYTES} little-endian bytes, and then itself",
                path,
            )
        elements.append(raw[start:at])
    return elements
