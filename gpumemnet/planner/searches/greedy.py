"""Greedy search: evict what frees most per second, then undo and exchange decisions while that
makes the step faster.

It starts several times, each time with other options, because options that pay one by one may not
pay together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.planner.chain import KEEP, OPTIONS, Chain
from gpumemnet.planner.decisions import Decision
from gpumemnet.planner.searches.found import Found

Choices = NDArray[np.int64]
_NO_TIME: Final = 1e-9
"""Seconds added to a cost, so that what is free is not divided by zero."""
_STARTS: Final = (
    tuple(Decision),
    (Decision.RECOMPUTE, Decision.RECOMPUTE_CHEAP),
    (Decision.RECOMPUTE, Decision.RECOMPUTE_AND_SWAP_INPUT),
    (Decision.SWAP,),
)
_FEW_UNITS: Final = 32
"""Up to so many units are evicted one after another, and every start is improved.  So that planning
stays short, larger networks evict one more at once for each further so many units, and improve only
the starts near the fastest one."""
_NEAR: Final = 0.25
"""Share by which the step of a near start is longer at most."""
_ROUNDS: Final = 200
_EXCHANGES: Final = 4096
"""Most exchanges of two decisions that one round looks at."""


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
    starts = _different(_without_superfluous(chain, limit_bytes, np.array(evicted)))
    seconds = chain.step_seconds(starts)
    if chain.units > _FEW_UNITS:
        starts = starts[seconds <= (1 + _NEAR) * seconds.min()]
    plans = _different([polished(chain, limit_bytes, choices) for choices in starts])
    order = chain.step_seconds(plans).argsort(kind="stable")
    return Found(plans[order[0]], others=tuple(plans[order[1:]]))


def _different(rows: Iterable[Choices]) -> Choices:
    """Return equal rows once, in their order: of plans that take equally long, that of the first
    start is the most regular."""
    return np.array(list({row.tobytes(): row for row in rows}.values()))


def polished(chain: Chain, limit_bytes: float, choices: Choices) -> Choices:
    """Return ``choices`` after all changes that make the step faster and fit.

    They are: one decision, one decision that makes others superfluous, and two decisions.
    """
    seconds = float(chain.step_seconds(choices[None])[0])
    for _ in range(_ROUNDS):
        for change in (_single_changes, _replacements, _exchanges):
            neighbours = change(chain, choices, limit_bytes)
            times = chain.step_seconds(neighbours)
            faster = np.flatnonzero(times < seconds - _NO_TIME)
            faster = faster[np.argsort(times[faster], kind="stable")]
            found = _first_fitting(chain, limit_bytes, neighbours, faster)
            if found is not None:
                choices, seconds = neighbours[found], float(times[found])
                break
        else:
            break
    return choices


def _first_fitting(
    chain: Chain, limit_bytes: float, rows: Choices, order: NDArray[np.intp]
) -> int | None:
    for start in range(0, len(order), 64):
        chunk = order[start : start + 64]
        fits = np.flatnonzero(chain.fits(rows[chunk], limit_bytes))
        if len(fits):
            return int(chunk[fits[0]])
    return None


def _evict(chain: Chain, limit_bytes: float, usable: NDArray[np.bool_]) -> Choices | None:
    """Change one decision after another, by what it frees above the limit for each second that it
    costs."""
    choices = chain.keep_all()
    if (_least_bytes(chain, usable) > limit_bytes).any():
        return None
    amounts = chain.region_bytes(choices[None])[0]
    seconds = chain.step_seconds(choices[None])[0]
    while (amounts > limit_bytes).any():
        rows = _single_changes(chain, choices, usable=usable)
        rows = rows[chain.host_bytes_of(rows) <= chain.host_limit_bytes]
        units = (rows != choices).argmax(axis=1)
        after = _changed_bytes(
            chain, np.repeat(choices[None], len(rows), axis=0), amounts[None], units, rows
        )
        freed = _excess(amounts[None], limit_bytes) - _excess(after, limit_bytes)
        useful = np.flatnonzero(freed > 0)
        if not len(useful):
            return None
        cost = np.maximum(chain.step_seconds(rows[useful]) - seconds, 0) + _NO_TIME
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
        amounts, seconds = (
            chain.region_bytes(choices[None])[0],
            chain.step_seconds(choices[None])[0],
        )
    return choices


def _least_bytes(chain: Chain, usable: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the bytes of each region if every unit took the option that frees most there."""
    gone = np.where(usable[:, :, None], chain.gone_bytes, -np.inf).max(axis=1).sum(axis=0)
    shared = sum(
        (each.amount_bytes * each.regions for each in chain.shared), start=np.zeros_like(gone)
    )
    return np.asarray(chain.live_bytes - gone - shared)


def _changed_bytes(
    chain: Chain,
    rows: Choices,
    amounts: NDArray[np.float64],
    units: NDArray[np.intp],
    changed: Choices,
) -> NDArray[np.float64]:
    """Return the bytes of each region for ``changed``, which differs from ``rows`` in one decision
    a row.

    Args:
        chain: the chain.
        rows: plans, shape ``[plans, n]``, with ``amounts`` in their regions.
        amounts: shape ``[plans, r]``, or ``[1, r]`` if all rows are equal.
        units: the unit that changes in each row.
        changed: the changed plans.
    """
    if chain.shared:
        return chain.region_bytes(changed)
    each, gone = np.arange(len(rows)), chain.gone_bytes
    return np.asarray(amounts + gone[units, rows[each, units]] - gone[units, changed[each, units]])


def _excess(amounts: NDArray[np.float64], limit_bytes: float) -> NDArray[np.float64]:
    """Return the bytes above the limit, summed over the regions, for each row of ``amounts``."""
    return np.asarray(np.maximum(amounts - limit_bytes, 0).sum(axis=1))


def _single_changes(
    chain: Chain,
    choices: Choices,
    limit_bytes: float = np.inf,
    *,
    usable: NDArray[np.bool_] | None = None,
) -> Choices:
    units, options = _other_options(chain.allowed if usable is None else usable, choices)
    rows = np.repeat(choices[None], len(units), axis=0)
    rows[np.arange(len(units)), units] = options
    return rows


def _other_options(
    usable: NDArray[np.bool_], choices: Choices
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the units and the options of all changes of one decision."""
    units, options = np.nonzero(usable)
    is_change = options != choices[units]
    return units[is_change], options[is_change]


def _replacements(chain: Chain, choices: Choices, limit_bytes: float) -> Choices:
    """Return rows in which one unit changes, and what that makes superfluous is kept again."""
    return _without_superfluous(chain, limit_bytes, _single_changes(chain, choices))


def _without_superfluous(chain: Chain, limit_bytes: float, rows: Choices) -> Choices:
    """Return ``rows`` with units kept again, the most costly ones first, as far as each row still
    fits."""
    rows, each = rows.copy(), np.arange(len(rows))
    cost = chain.recompute_seconds + np.maximum(chain.out_seconds, chain.in_seconds)
    order = (-cost[np.arange(chain.units), rows]).argsort(axis=1, kind="stable")
    amounts = chain.region_bytes(rows)
    for place in range(int((rows != KEEP).sum(axis=1).max(initial=0))):
        tried = rows.copy()
        tried[each, order[:, place]] = KEEP
        after = _changed_bytes(chain, rows, amounts, order[:, place], tried)
        fits = (after.max(axis=1) <= limit_bytes) & (
            chain.host_bytes_of(tried) <= chain.host_limit_bytes
        )
        rows[fits], amounts[fits] = tried[fits], after[fits]
    return rows


def _exchanges(chain: Chain, choices: Choices, limit_bytes: float) -> Choices:
    """Return rows in which one unit that is evicted keeps, or takes another option, and another
    unit changes too."""
    units, options = _other_options(chain.allowed, choices)
    first, second = np.nonzero((choices[units] != KEEP)[:, None] & (units[:, None] != units))
    some = slice(None, None, max(len(first) // _EXCHANGES, 1))
    rows = np.repeat(choices[None], len(first[some]), axis=0)
    each = np.arange(len(rows))
    for change in (first[some], second[some]):
        rows[each, units[change]] = options[change]
    return rows
