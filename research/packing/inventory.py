"""The GPUs that jobs are packed onto: kinds of the catalogue, whole or MIG instances, and how many
of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.predict.fits import Target, target

MAX_CARDS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Cards of several kinds, those of a kind side by side.

    Attributes:
        kinds: what each kind is, with the MiB that a process can use of it: its memory less what
            the driver keeps.
        counts: how many there are of each kind.
    """

    kinds: tuple[Target, ...]
    counts: tuple[int, ...]

    @property
    def cards(self) -> int:
        """How many cards there are."""
        return sum(self.counts)

    @property
    def kind_of_card(self) -> NDArray[np.int64]:
        """The kind of each card, shape ``[cards]``."""
        return np.repeat(np.arange(len(self.kinds)), self.counts)

    @property
    def capacity_mib(self) -> NDArray[np.int64]:
        """What can be used of each card, shape ``[cards]``."""
        return np.array([kind.available_mib for kind in self.kinds], dtype=np.int64)[
            self.kind_of_card
        ]

    @property
    def largest_mib(self) -> int:
        """What can be used of the largest card."""
        return max(kind.available_mib for kind in self.kinds)

    def __str__(self) -> str:
        names = (kind.gpu + (f" {kind.mig}" if kind.mig else "") for kind in self.kinds)
        return ", ".join(
            f"{count} × {name}" for count, name in zip(self.counts, names, strict=True)
        )


def inventory(text: str) -> Inventory:
    """An inventory as a user writes it: ``A100:8,H200:4``, ``A100/3g.20gb:16``; one card where no
    number stands.

    Raises:
        InvalidRequestError: on a GPU that is not in the catalogue, or a number that is none.
    """
    counts: dict[Target, int] = {}
    for part in text.split(","):
        name, colon, number = part.strip().rpartition(":")
        if not colon:
            name, number = part.strip(), "1"
        if not name:
            raise InvalidRequestError(f"must look like A100:8,H200:4, not {describe(text)}", "gpus")
        if not (
            number.isascii()
            and number.isdigit()
            and 0 < int(number[:9]) <= MAX_CARDS
            and len(number) < 9
        ):
            raise InvalidRequestError(
                f"needs a number of cards from 1 to {MAX_CARDS} after {name}:, not {describe(number)}",
                "gpus",
            )
        try:
            kind = target(name)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, "gpus") from None
        counts[kind] = counts.get(kind, 0) + int(number)
    if sum(counts.values()) > MAX_CARDS:
        raise InvalidRequestError(f"holds more than {MAX_CARDS} cards", "gpus")
    return Inventory(kinds=tuple(counts), counts=tuple(counts.values()))
