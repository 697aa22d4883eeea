"""The scheduler's view of the GPUs: the memory reserved on each, and where the next job goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from research.packing.inventory import Inventory

FITS: Final = ("best", "first", "spread")
"""Which of the cards that hold a job gets it: the one with the least memory left, the first, or the
one with the most."""
_EVERY: Final = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the simulated scheduler decides.

    Attributes:
        fit: one of :data:`FITS`.
        backfill: so many jobs behind one that does not fit may go first; 0 is a plain queue.  No
            card is kept for a job that is overtaken, so one that needs a card to itself may wait
            long.
        most_per_card: most jobs on a card at once; ``None`` for as many as fit.
        slowdown: with ``k`` jobs on a card each runs ``1 + slowdown · (k − 1)`` times as long; 0
            leaves compute out.
        ramp_seconds: a job takes its peak so long after its start; then it is that somebody runs
            out of memory.

    Raises:
        InvalidRequestError: on an impossible value.
    """

    fit: str = "best"
    backfill: int = 0
    most_per_card: int | None = None
    slowdown: float = 0.0
    ramp_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.fit not in FITS:
            raise InvalidRequestError(
                f"must be one of {', '.join(FITS)}, not {describe(self.fit)}", "fit"
            )
        for name, least, most in (
            ("backfill", 0, 10_000),
            ("slowdown", 0, 100),
            ("ramp_seconds", 0, 1e6),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidRequestError(
                    f"must be from {least} to {most:g}, not {getattr(self, name)}", name
                )
        if self.most_per_card is not None and self.most_per_card < 1:
            raise InvalidRequestError(
                f"must be at least 1, not {self.most_per_card}", "most_per_card"
            )


class Cards:
    """The memory reserved on every GPU; the true memory is unknown here."""

    def __init__(self, inventory: Inventory, policy: Policy) -> None:
        self.capacity_mib = inventory.capacity_mib
        self._kind = inventory.kind_of_card
        self._fit = policy.fit
        self._most = policy.most_per_card or _EVERY
        self.free_mib = self.capacity_mib.copy()
        self.jobs = np.zeros(len(self.capacity_mib), dtype=np.int64)
        self._is_alone = np.zeros(len(self.capacity_mib), dtype=bool)
        self._roomiest_mib: int | None = None
        self._largest_empty_mib: int | None = None

    def place(
        self, amounts_mib: np.ndarray[tuple[int], np.dtype[np.int64]], least_mib: int
    ) -> int | None:
        """A card on which what ``amounts_mib`` says for its kind is free; ``None`` where there is
        none.

        Args:
            amounts_mib: shape ``[K]``.
            least_mib: the smallest of them.
        """
        if self._roomiest_mib is None:
            open_mib = np.where(self._is_alone | (self.jobs >= self._most), -1, self.free_mib)
            self._roomiest_mib = int(open_mib.max())
        if least_mib > self._roomiest_mib:
            return None
        left_mib = self.free_mib - amounts_mib[self._kind]
        return self._chosen((left_mib >= 0) & ~self._is_alone & (self.jobs < self._most), left_mib)

    def place_alone(self, least_card_mib: int) -> int | None:
        """An empty card with at least that capacity; ``None`` where there is none."""
        if self._largest_empty_mib is None:
            self._largest_empty_mib = int(np.where(self.jobs == 0, self.capacity_mib, -1).max())
        if max(least_card_mib, 0) > self._largest_empty_mib:
            return None
        return self._chosen(
            (self.jobs == 0) & (self.capacity_mib >= least_card_mib), self.capacity_mib
        )

    def take(
        self, card: int, kind_amounts_mib: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    ) -> int:
        """Set memory aside on ``card``, all of it without amounts; returns how much."""
        self._forget()
        self.jobs[card] += 1
        if kind_amounts_mib is None:
            self._is_alone[card] = True
            amount_mib = int(self.capacity_mib[card])
        else:
            amount_mib = int(kind_amounts_mib[self._kind[card]])
        self.free_mib[card] -= amount_mib
        return amount_mib

    def give_back(self, card: int, amount_mib: int) -> None:
        """Free what :meth:`take` has reserved."""
        self._forget()
        self.jobs[card] -= 1
        self.free_mib[card] += amount_mib
        self._is_alone[card] = False

    def _forget(self) -> None:
        self._roomiest_mib = self._largest_empty_mib = None

    def _chosen(
        self,
        candidates: np.ndarray[tuple[int], np.dtype[np.bool_]],
        left_mib: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> int | None:
        places = np.flatnonzero(candidates)
        if not len(places):
            return None
        if self._fit == "first":
            return int(places[0])
        left = left_mib[places]
        return int(places[left.argmin() if self._fit == "best" else left.argmax()])
