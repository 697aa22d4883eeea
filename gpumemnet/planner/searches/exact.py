"""Exact search: the chain as a mixed-integer linear programme, solved by HiGHS (Huangfu and Hall,
2018) through scipy.

Each option of a unit has a binary column.  Each group of shared storages has one from 0 to 1:
whether it is gone.  Further columns are the times at which forward passes, copies and backward
passes end.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import MissingExtraError
from gpumemnet.planner.chain import KEEP, Chain
from gpumemnet.planner.decisions import COPIES_BEHIND, FETCHED_AHEAD
from gpumemnet.planner.searches.found import Found

TIME_LIMIT_SECONDS: Final = 10.0
RELATIVE_GAP: Final = 1e-4


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
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "scipy":
            raise
        raise MissingExtraError("scipy", "plan", "the optimizer 'exact'") from None
    program = _Program(chain, limit_bytes, known_seconds)
    matrix = csr_array(
        (program.values, (program.row_of, program.column_of)),
        shape=(len(program.lower), program.columns),
    )
    result = milp(
        program.cost,
        integrality=program.integrality,
        bounds=Bounds(program.smallest, program.largest),
        constraints=LinearConstraint(matrix, program.lower, program.upper),
        options={"time_limit": time_limit_seconds, "mip_rel_gap": RELATIVE_GAP},
    )
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
        keep_seconds = float(chain.step_seconds(chain.keep_all()[None])[0])
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
        self._add_order()

    def _add_order(self) -> None:
        """Of two neighbours with equal costs, the later one is evicted only if the earlier one is.

        The earlier one is gone for longer, and its copies have more time.  Without these rows the
        solver tries every order.
        """
        chain = self._chain
        tables = (
            chain.allowed,
            chain.recompute_seconds,
            chain.out_seconds,
            chain.in_seconds,
            chain.host_bytes,
        )
        held = {unit for shared in chain.shared for unit in shared.units}
        for unit in range(chain.units - 1):
            following = unit + 1
            is_equal = all(
                np.allclose(table[unit], table[following], rtol=1e-9) for table in tables
            )
            is_equal &= np.allclose(
                chain.gone_bytes[unit].max(axis=1), chain.gone_bytes[following].max(axis=1)
            )
            for seconds in (chain.forward_seconds, chain.backward_seconds):
                is_equal &= np.allclose(seconds[unit], seconds[following], rtol=1e-9)
            if is_equal and not held & {unit, following}:
                pair = {
                    self._option_columns[following, KEEP]: -1.0,
                    self._option_columns[unit, KEEP]: 1.0,
                }
                self._row(pair, -np.inf, 0)

    def choices(self, solution: NDArray[np.float64]) -> NDArray[np.int64]:
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

    def _options(self, unit: int, table: NDArray[np.float64], scale: float) -> dict[int, float]:
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
            out = self._options(unit, chain.out_seconds, scale)
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
            back = self._options(unit, chain.in_seconds, scale)
            issued = self._backward + max(place - FETCHED_AHEAD, 0)
            at_least(fetched, issued, 0, back)
            if place:
                at_least(fetched, fetched - 1, 0, back)
            at_least(end, arrival, chain.backward_seconds[unit], recompute)
            at_least(end, fetched, chain.backward_seconds[unit], recompute)
