"""The simulated cluster: GPUs, the scheduler's policy, and the replay of a trace."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.predict.gpu_fit import Target, target
from research.packing.amounts import Amounts
from research.packing.trace import Workload

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


FITS: Final = ("best", "first", "spread")
"""Which of the cards that hold a job gets it: the one with the least memory left, the first, or the
one with the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the simulated scheduler decides.

    Attributes:
        fit: one of :data:`FITS`.
        backfill: so many jobs behind one that does not fit may go first; 0 is a plain queue.  No
            card is kept for a job that is overtaken, so one that needs a card to itself may wait
            long.
        ramp_seconds: a job takes its peak so long after its start; then it is that somebody runs
            out of memory.

    Raises:
        InvalidRequestError: on an impossible value.
    """

    fit: str = "best"
    backfill: int = 0
    ramp_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.fit not in FITS:
            raise InvalidRequestError(
                f"must be one of {', '.join(FITS)}, not {describe(self.fit)}", "fit"
            )
        for name, most in (("backfill", 10_000), ("ramp_seconds", 1e6)):
            if not 0 <= getattr(self, name) <= most:
                raise InvalidRequestError(
                    f"must be from 0 to {most:g}, not {getattr(self, name)}", name
                )


class Cards:
    """The memory reserved on every GPU; the true memory is unknown here."""

    def __init__(self, inventory: Inventory, policy: Policy) -> None:
        self.capacity_mib = inventory.capacity_mib
        self._kind = inventory.kind_of_card
        self._fit = policy.fit
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
            self._roomiest_mib = int(np.where(self._is_alone, -1, self.free_mib).max())
        if least_mib > self._roomiest_mib:
            return None
        left_mib = self.free_mib - amounts_mib[self._kind]
        return self._chosen((left_mib >= 0) & ~self._is_alone, left_mib)

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


_PEAK: Final = 0
_END: Final = 1
"""Kinds of events; of those at one moment peaks come first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What happened to ``J`` jobs; times in seconds from the first arrival.

    Attributes:
        is_run: jobs that were run; the others need more than any card has, shape ``[J]``.
        start_seconds, end_seconds: of the attempt that ended well, shape ``[J]``; NaN for jobs that
            were not run.
        card: where, shape ``[J]``; -1 likewise.
        reserved_mib: what was set aside for that attempt, shape ``[J]``.
        ooms: how often each ran out of memory before, shape ``[J]``.
        has_shared: whether another job was on its card at any time of any attempt, shape ``[J]``.
        lost_seconds: how long its failed attempts ran, shape ``[J]``.
        lost_mib_seconds: memory that was set aside for them, times their length, shape ``[J]``.
        busy_seconds: how long each card had a job, shape ``[cards]``.
        most_mib: the most true memory that was ever on each card, shape ``[cards]``.
    """

    is_run: NDArray[np.bool_]
    start_seconds: NDArray[np.float64]
    end_seconds: NDArray[np.float64]
    card: NDArray[np.int64]
    reserved_mib: NDArray[np.int64]
    ooms: NDArray[np.int64]
    has_shared: NDArray[np.bool_]
    lost_seconds: NDArray[np.float64]
    lost_mib_seconds: NDArray[np.float64]
    busy_seconds: NDArray[np.float64]
    most_mib: NDArray[np.int64]


def simulate(
    jobs: Workload, amounts: Amounts, inventory: Inventory, policy: Policy | None = None
) -> Run:
    """Replay ``jobs`` on ``inventory`` with what one estimator sets aside for them; the same
    arguments give the same run."""
    return _Simulation(jobs, amounts, inventory, policy or Policy()).run()


class _Simulation:
    def __init__(
        self, jobs: Workload, amounts: Amounts, inventory: Inventory, policy: Policy
    ) -> None:
        count, cards = len(jobs.row_of), inventory.cards
        self._policy = policy
        self._cards = Cards(inventory, policy)
        self._amounts = amounts.mib[jobs.row_of]
        self._least_amount: list[int] = self._amounts.min(axis=1).tolist()
        self._is_alone: list[bool] = amounts.is_alone[jobs.row_of].tolist()
        self._least_card: list[int] = amounts.least_card_mib[jobs.row_of].tolist()
        self._peak: list[int] = jobs.peak_mib.tolist()
        self._arrival: list[float] = jobs.arrival_seconds.tolist()
        self._duration: list[float] = jobs.duration_seconds.tolist()
        self._capacity: list[int] = inventory.capacity_mib.tolist()
        self._is_run = jobs.peak_mib <= inventory.largest_mib
        # of each job
        self._start, self._end = np.full((2, count), np.nan).tolist()
        self._card = [-1] * count
        self._reserved, self._ooms, self._attempt = ([0] * count for _ in range(3))
        self._lost_seconds, self._lost_mib_seconds = ([0.0] * count for _ in range(2))
        self._has_shared, self._has_peaked = [False] * count, [False] * count
        # of each card
        self._on: list[set[int]] = [set() for _ in range(cards)]
        self._used, self._most = [0] * cards, [0] * cards
        self._busy_since, self._busy = [0.0] * cards, [0.0] * cards
        self._queue: deque[int] = deque()
        self._is_open = False
        """Whether a job left a card or came into reach since the queue was last looked at: else
        nothing new can be placed."""
        self._events: list[tuple[float, int, int, int]] = []
        """Time, kind, job, and the attempt that it belongs to."""

    def run(self) -> Run:
        arriving = deque(np.flatnonzero(self._is_run).tolist())
        events = self._events
        while arriving or events:
            now = min(
                self._arrival[arriving[0]] if arriving else float("inf"),
                events[0][0] if events else float("inf"),
            )
            while events and events[0][0] <= now:
                _, kind, job, attempt = heapq.heappop(events)
                if attempt != self._attempt[job]:
                    continue
                if kind == _PEAK:
                    self._reach_peak(now, job)
                else:
                    self._end[job] = now
                    self._leave(now, job)
            while arriving and self._arrival[arriving[0]] <= now:
                self._is_open |= len(self._queue) <= self._policy.backfill
                self._queue.append(arriving.popleft())
            if self._is_open:
                self._schedule(now)
        assert not self._queue
        return self._result()

    def _schedule(self, now: float) -> None:
        self._is_open = False
        queue = self._queue
        passed: list[int] = []
        while queue and len(passed) <= self._policy.backfill:
            job = queue.popleft()
            if self._is_alone[job]:
                card = self._cards.place_alone(self._least_card[job])
            else:
                card = self._cards.place(self._amounts[job], self._least_amount[job])
            if card is None:
                passed.append(job)
            else:
                self._begin(now, job, card)
        queue.extendleft(reversed(passed))

    def _begin(self, now: float, job: int, card: int) -> None:
        on = self._on[card]
        if not on:
            self._busy_since[card] = now
        else:
            self._has_shared[job] = True
            for neighbour in on:
                self._has_shared[neighbour] = True
        on.add(job)
        self._attempt[job] += 1
        self._start[job], self._card[job], self._has_peaked[job] = now, card, False
        self._reserved[job] = self._cards.take(
            card, None if self._is_alone[job] else self._amounts[job]
        )
        peak_seconds = min(self._policy.ramp_seconds, self._duration[job])
        for seconds, kind in ((peak_seconds, _PEAK), (self._duration[job], _END)):
            heapq.heappush(self._events, (now + seconds, kind, job, self._attempt[job]))

    def _reach_peak(self, now: float, job: int) -> None:
        card = self._card[job]
        used = self._used[card] + self._peak[job]
        if used <= self._capacity[card]:
            self._has_peaked[job] = True
            self._used[card] = used
            self._most[card] = max(self._most[card], used)
            return
        self._ooms[job] += 1
        seconds = now - self._start[job]
        self._lost_seconds[job] += seconds
        self._lost_mib_seconds[job] += seconds * self._reserved[job]
        if len(self._on[card]) == 1:
            self._least_card[job] = max(self._least_card[job], self._capacity[card] + 1)
        self._is_alone[job] = True
        self._leave(now, job)
        self._queue.appendleft(job)

    def _leave(self, now: float, job: int) -> None:
        card = self._card[job]
        on = self._on[card]
        on.remove(job)
        self._is_open = True
        self._attempt[job] += 1
        if self._has_peaked[job]:
            self._used[card] -= self._peak[job]
        self._cards.give_back(card, self._reserved[job])
        if not on:
            self._busy[card] += now - self._busy_since[card]

    def _result(self) -> Run:
        return Run(
            is_run=self._is_run,
            start_seconds=np.array(self._start),
            end_seconds=np.array(self._end),
            card=np.array(self._card),
            reserved_mib=np.array(self._reserved),
            ooms=np.array(self._ooms),
            has_shared=np.array(self._has_shared),
            lost_seconds=np.array(self._lost_seconds),
            lost_mib_seconds=np.array(self._lost_mib_seconds),
            busy_seconds=np.array(self._busy),
            most_mib=np.array(self._most),
        )
