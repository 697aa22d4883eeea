"""Searches for the fastest plan of a chain within a limit on live bytes: greedy, and exact.

:func:`greedy` evicts what frees most per second, then changes single decisions and undoes what that
makes superfluous.  It starts several times, each time with other options, because options that pay
one by one may not pay together.

:func:`exact` solves the chain as a mixed-integer linear programme with HiGHS (Huangfu and Hall,
2018) through scipy.  Each option of a unit has a binary column.  Each group of shared storages has
one from 0 to 1: whether it is gone.  Further columns are the times at which forward passes, copies
and backward passes end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from gpumemnet.errors import check_installed
from gpumemnet.job.job_table import Array, Flags, Indices
from gpumemnet.planner.chain import KEEP, OPTIONS, Chain
from gpumemnet.planner.plans import COPIES_BEHIND, FETCHED_AHEAD, Decision


@dataclass(frozen=True, eq=False)
class Found:
    """The result of a search.

    Attributes:
        choices: option of each unit, shape ``[n]``; ``None`` if the search found nothing that fits.
        bound_seconds: proven lower bound on the seconds of a step within the limit; ``None`` if the
            search proves none.
    """

    choices: Indices | None
    bound_seconds: float | None = None


_NO_TIME: Final = 1e-9
"""Seconds added to a cost, so that what is free is not divided by zero."""
_STARTS: Final = (
    tuple(Decision),
    (Decision.RECOMPUTE, Decision.RECOMPUTE_CHEAP),
    (Decision.RECOMPUTE, Decision.RECOMPUTE_AND_SWAP_INPUT),
    (Decision.SWAP,),
)
_ROUNDS: Final = 200
_FEW_UNITS: Final = 32
"""Up to so many units are evicted one after another.  So that planning stays short, larger networks
evict one more at once for each further so many units."""


def greedy(chain: Chain, limit_bytes: float) -> Found:
    """Search ``chain`` for the fastest plan whose regions stay within ``limit_bytes``."""
    usable = (
        chain.allowed & np.array([option in start or option is Decision.KEEP for option in OPTIONS])
        for start in _STARTS
    )
    evicted = [
        choices for each in usable if (choices := _evict(chain, limit_bytes, each)) is not None
    ]
    if not evicted:
        return Found(None)
    starts = _without_superfluous(chain, limit_bytes, np.array(evicted))
    plans = np.array([_polished(chain, limit_bytes, choices) for choices in starts])
    return Found(plans[chain.step_seconds(plans).argmin()])


def _polished(chain: Chain, limit_bytes: float, choices: Indices) -> Indices:
    """Return ``choices`` after all changes of one decision that make the step faster and fit; what
    a change makes superfluous is kept again."""
    seconds = chain.seconds_of(choices)
    for _ in range(_ROUNDS):
        rows = _without_superfluous(chain, limit_bytes, single_changes(chain, choices))
        times = chain.step_seconds(rows)
        times[~chain.fits(rows, limit_bytes)] = np.inf
        best = int(times.argmin())
        if times[best] >= seconds - _NO_TIME:
            break
        choices, seconds = rows[best], float(times[best])
    return choices


def _evict(chain: Chain, limit_bytes: float, usable: Flags) -> Indices | None:
    """Change one decision after another, by what it frees above the limit for each second that it
    costs."""
    choices = chain.keep_all()
    amounts = chain.region_bytes(choices[None])
    while (amounts > limit_bytes).any():
        rows = single_changes(chain, choices, usable=usable)
        rows = rows[chain.host_bytes_of(rows) <= chain.host_limit_bytes]
        units = (rows != choices).argmax(axis=1)
        changed = chain.changed_region_bytes(amounts, choices[None], rows)
        freed = _excess(amounts, limit_bytes) - _excess(changed, limit_bytes)
        useful = np.flatnonzero(freed > 0)
        if not len(useful):
            return None
        seconds = chain.step_seconds(np.concatenate((choices[None], rows[useful])))
        cost = np.maximum(seconds[1:] - seconds[0], 0) + _NO_TIME
        useful = useful[np.argsort(-freed[useful] / cost, kind="stable")]
        first_of_unit = np.sort(np.unique(units[useful], return_index=True)[1])
        best = useful[first_of_unit[: 1 + (chain.units - 1) // _FEW_UNITS]]
        together = choices.copy()
        together[units[best]] = rows[best, units[best]]
        choices = (
            together
            if chain.host_bytes_of(together[None])[0] <= chain.host_limit_bytes
            else rows[best[0]]
        )
        amounts = chain.region_bytes(choices[None])
    return choices


def _excess(amounts: Array, limit_bytes: float) -> Array:
    """Return the bytes above the limit, summed over the regions, for each row of ``amounts``."""
    return np.maximum(amounts - limit_bytes, 0).sum(axis=1)


def single_changes(chain: Chain, choices: Indices, usable: Flags | None = None) -> Indices:
    """Return rows in which one unit takes another option, of those that are ``usable``; by default
    of all that are allowed."""
    units, options = np.nonzero(chain.allowed if usable is None else usable)
    is_change = options != choices[units]
    units, options = units[is_change], options[is_change]
    rows = np.repeat(choices[None], len(units), axis=0)
    rows[np.arange(len(units)), units] = options
    return rows


def _without_superfluous(chain: Chain, limit_bytes: float, rows: Indices) -> Indices:
    """Return ``rows`` with units kept again, the most costly ones first, as far as each row still
    fits."""
    rows, each = rows.copy(), np.arange(len(rows))
    cost = chain.recompute_seconds + chain.copy_seconds
    amounts = chain.region_bytes(rows)
    order = (-cost[np.arange(chain.units), rows]).argsort(axis=1, kind="stable")
    for place in range(int((rows != KEEP).sum(axis=1).max(initial=0))):
        tried = rows.copy()
        tried[each, order[:, place]] = KEEP
        changed = chain.changed_region_bytes(amounts, rows, tried)
        fits = changed.max(axis=1) <= limit_bytes
        fits &= chain.host_bytes_of(tried) <= chain.host_limit_bytes
        rows[fits], amounts[fits] = tried[fits], changed[fits]
    return rows


TIME_LIMIT_SECONDS: Final = 10.0
RELATIVE_GAP: Final = 1e-4
_SOLVE_ERROR: Final = 4
"""Status of HiGHS when its presolve fails, which it does for few programmes."""


def exact(
    chain: Chain,
    limit_bytes: float,
    *,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    known_seconds: float = np.inf,
) -> Found:
    """Search ``chain`` for the fastest plan whose regions stay within ``limit_bytes``.

    Args:
        chain: the chain.
        limit_bytes: the limit.
        time_limit_seconds: after this time the best plan so far is returned, with its bound.
        known_seconds: seconds of a step with a plan that is known to fit.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    check_installed("scipy", "plan", "the optimizer 'exact'")
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    program = _Program(chain, limit_bytes, known_seconds)
    matrix = csr_array(
        (program.values, (program.row_of, program.column_of)),
        shape=(len(program.lower), program.columns),
    )
    for presolve in (True, False):
        result = milp(
            program.cost,
            integrality=program.integrality,
            bounds=Bounds(program.smallest, program.largest),
            constraints=LinearConstraint(matrix, program.lower, program.upper),
            options={
                "time_limit": time_limit_seconds,
                "mip_rel_gap": RELATIVE_GAP,
                "presolve": presolve,
            },
        )
        if result.status != _SOLVE_ERROR:
            break
    if result.x is None:
        return Found(None)
    bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
    return Found(
        program.choices(result.x),
        float(bound) * program.scale_seconds * chain.passes + chain.other_seconds,
    )


class _Program:
    """The programme's columns and rows; times in units of the step, bytes in units of the limit."""

    def __init__(self, chain: Chain, limit_bytes: float, known_seconds: float) -> None:
        self._chain = chain
        n = chain.units
        keep_seconds = chain.seconds_of(chain.keep_all())
        self.scale_seconds = max((keep_seconds - chain.other_seconds) / chain.passes, 1e-12)
        self._scale_bytes = max(abs(limit_bytes), 1.0)
        self._option_columns = {
            pair: column
            for column, pair in enumerate(zip(*map(list, np.nonzero(chain.allowed)), strict=True))
        }
        options = len(self._option_columns)
        self._gone = options
        self._forward = self._gone + len(chain.shared)
        self._copied = self._forward + n
        self._backward = self._copied + n
        self._fetched = self._backward + n + 1
        self._turn = self._fetched + n
        self.columns = self._turn + 1
        self.cost = np.zeros(self.columns)
        self.cost[self._backward + n] = 1
        self.integrality = np.zeros(self.columns)
        self.integrality[:options] = 1
        self.smallest = np.zeros(self.columns)
        self.largest = np.full(self.columns, np.inf)
        self.largest[: self._forward] = 1
        if np.isfinite(known_seconds):
            known = (known_seconds - chain.other_seconds) / chain.passes / self.scale_seconds
            self.largest[self._backward + n] = known * (1 + 1e-6)
        self.row_of: list[int] = []
        self.column_of: list[int] = []
        self.values: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        for unit in range(n):
            self._row(
                {column: 1.0 for (u, _), column in self._option_columns.items() if u == unit}, 1, 1
            )
        self._add_memory(limit_bytes)
        self._add_times()

    def choices(self, solution: Array) -> Indices:
        """Return the option of each unit."""
        choices = self._chain.keep_all()
        for (unit, option), column in self._option_columns.items():
            if solution[column] > 0.5:
                choices[unit] = option
        return choices

    def _row(self, terms: dict[int, float], lower: float, upper: float) -> None:
        for column, value in terms.items():
            if value:
                self.row_of.append(len(self.lower))
                self.column_of.append(column)
                self.values.append(value)
        self.lower.append(lower)
        self.upper.append(upper)

    def _options(self, unit: int, table: Array, scale: float) -> dict[int, float]:
        """Return the terms that add up to what the chosen option of ``unit`` has in ``table``."""
        return {
            c: float(table[u, o]) * scale for (u, o), c in self._option_columns.items() if u == unit
        }

    def _add_memory(self, limit_bytes: float) -> None:
        chain, columns = self._chain, self._option_columns
        units, options = np.array(list(columns)).T
        gone = chain.gone_bytes[units, options]
        worst = chain.live_bytes + np.maximum(-chain.gone_bytes, 0).max(axis=1).sum(axis=0)
        for region in np.flatnonzero(worst > limit_bytes):
            terms = {
                column: -float(amount) / self._scale_bytes
                for column, amount in enumerate(gone[:, region])
            }
            for index, shared in enumerate(chain.shared):
                if shared.regions[region]:
                    terms[self._gone + index] = -shared.amount_bytes / self._scale_bytes
            self._row(terms, -np.inf, (limit_bytes - chain.live_bytes[region]) / self._scale_bytes)
        for index, shared in enumerate(chain.shared):
            for row, unit in enumerate(shared.units):
                lets_go = {
                    c: -1.0 for (u, o), c in columns.items() if u == unit and shared.lets_go[row, o]
                }
                self._row({self._gone + index: 1.0, **lets_go}, -np.inf, 0)
        if np.isfinite(chain.host_limit_bytes):
            terms = {
                c: float(chain.host_bytes[u, o]) / self._scale_bytes
                for (u, o), c in columns.items()
            }
            self._row(terms, -np.inf, chain.host_limit_bytes / self._scale_bytes)

    def _add_times(self) -> None:
        chain, scale = self._chain, 1 / self.scale_seconds
        n = chain.units

        def at_least(
            column: int, after: int | None, seconds: float, *parts: dict[int, float]
        ) -> None:
            """Require ``column >= after + seconds + parts``."""
            terms = {column: 1.0}
            if after is not None:
                terms[after] = -1.0
            for part in parts:
                for key, value in part.items():
                    terms[key] = terms.get(key, 0.0) - value
            self._row(terms, seconds * scale, np.inf)

        for unit in range(n):
            forward, copied = self._forward + unit, self._copied + unit
            at_least(forward, forward - 1 if unit else None, chain.forward_seconds[unit])
            if unit > COPIES_BEHIND:  # the forward pass before ends with a wait for these copies
                at_least(
                    forward, self._copied + unit - 1 - COPIES_BEHIND, chain.forward_seconds[unit]
                )
            out = self._options(unit, chain.copy_seconds, scale)
            at_least(copied, forward, 0, out)
            if unit:
                at_least(copied, copied - 1, 0, out)
        at_least(self._turn, self._forward + n - 1, chain.turn_forward_seconds)
        if n > COPIES_BEHIND:
            at_least(self._turn, self._copied + n - 1 - COPIES_BEHIND, chain.turn_forward_seconds)
        at_least(self._turn, self._copied + n - 1, 0)
        at_least(self._backward, self._turn, chain.turn_backward_seconds)
        for place, unit in enumerate(chain.backward_order):
            arrival, end, fetched = (
                self._backward + place,
                self._backward + place + 1,
                self._fetched + place,
            )
            recompute = self._options(unit, chain.recompute_seconds, scale)
            back = self._options(unit, chain.copy_seconds, scale)
            issued = self._backward + max(place - FETCHED_AHEAD, 0)
            at_least(fetched, issued, 0, back)
            if place:
                at_least(fetched, fetched - 1, 0, back)
            at_least(end, arrival, chain.backward_seconds[unit], recompute)
            at_least(end, fetched, chain.backward_seconds[unit], recompute)
