"""Greedy search: evict what frees most per second, then undo and exchange decisions while that makes the step faster.

It starts several times, each time with other options, because options that pay one by one may not pay together.
"""

from __future__ import annotations

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
_ROUNDS: Final = 200
_EXCHANGES: Final = 4096
"""Most exchanges of two decisions that one round looks at."""


def greedy(chain: Chain, limit_bytes: float) -> Found:
    """Search ``chain`` for the fastest plan whose regions stay within ``limit_bytes``."""
    found: dict[bytes, tuple[float, Choices]] = {}
    for options in _STARTS:
        usable = chain.allowed & np.array([option in options or option is Decision.KEEP for option in OPTIONS])
        choices = _evict(chain, limit_bytes, usable)
        if choices is None:
            continue
        choices = polished(chain, limit_bytes, _without_superfluous(chain, limit_bytes, choices[None])[0])
        found[choices.tobytes()] = float(chain.step_seconds(choices[None])[0]), choices
    plans = [choices for _, choices in sorted(found.values(), key=lambda pair: pair[0])]
    return Found(plans[0], others=tuple(plans[1:])) if plans else Found(None)


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


def _first_fitting(chain: Chain, limit_bytes: float, rows: Choices, order: NDArray[np.intp]) -> int | None:
    for start in range(0, len(order), 64):
        chunk = order[start : start + 64]
        fits = np.flatnonzero(chain.fits(rows[chunk], limit_bytes))
        if len(fits):
            return int(chunk[fits[0]])
    return None


def _evict(chain: Chain, limit_bytes: float, usable: NDArray[np.bool_]) -> Choices | None:
    """Change one decision after another, by what it frees above the limit for each second that it costs."""
    choices = chain.keep_all()
    if (_least_bytes(chain, usable) > limit_bytes).any():
        return None
    amounts = chain.region_bytes(choices[None])[0]
    seconds = chain.step_seconds(choices[None])[0]
    while (amounts > limit_bytes).any():
        rows = _single_changes(chain, choices, usable=usable)
        rows = rows[chain.host_bytes_of(rows) <= chain.host_limit_bytes]
        after = _changed_bytes(chain, choices, amounts, rows)
        freed = _excess(amounts[None], limit_bytes) - _excess(after, limit_bytes)
        useful = np.flatnonzero(freed > 0)
        if not len(useful):
            return None
        cost = np.maximum(chain.step_seconds(rows[useful]) - seconds, 0) + _NO_TIME
        best = useful[int(np.argmax(freed[useful] / cost))]
        choices, amounts = rows[best], after[best]
        seconds = chain.step_seconds(choices[None])[0]
    return choices


def _least_bytes(chain: Chain, usable: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the bytes of each region if every unit took the option that frees most there."""
    gone = np.where(usable[:, :, None], chain.gone_bytes, -np.inf).max(axis=1).sum(axis=0)
    shared = sum((each.amount_bytes * each.regions for each in chain.shared), start=np.zeros_like(gone))
    return np.asarray(chain.live_bytes - gone - shared)


def _changed_bytes(chain: Chain, choices: Choices, amounts: NDArray[np.float64], rows: Choices) -> NDArray[np.float64]:
    """Return the bytes of each region for ``rows``, each of which changes one decision of ``choices``."""
    if chain.shared or not len(rows):
        return chain.region_bytes(rows)
    units = (rows != choices).argmax(axis=1)
    gone = chain.gone_bytes
    return np.asarray(amounts + gone[units, choices[units]] - gone[units, rows[np.arange(len(rows)), units]])


def _excess(amounts: NDArray[np.float64], limit_bytes: float) -> NDArray[np.float64]:
    """Return the bytes above the limit, summed over the regions, for each row of ``amounts``."""
    return np.asarray(np.maximum(amounts - limit_bytes, 0).sum(axis=1))


def _single_changes(
    chain: Chain, choices: Choices, limit_bytes: float = np.inf, *, usable: NDArray[np.bool_] | None = None
) -> Choices:
    usable = (chain.allowed if usable is None else usable).copy()
    usable[np.arange(chain.units), choices] = False
    units, options = np.nonzero(usable)
    rows = np.repeat(choices[None], len(units), axis=0)
    rows[np.arange(len(units)), units] = options
    return rows


def _replacements(chain: Chain, choices: Choices, limit_bytes: float) -> Choices:
    """Return rows in which one unit changes, and what that makes superfluous is kept again."""
    return _without_superfluous(chain, limit_bytes, _single_changes(chain, choices))


def _without_superfluous(chain: Chain, limit_bytes: float, rows: Choices) -> Choices:
    """Return ``rows`` with units kept again, the most costly ones first, as far as each row still fits."""
    rows = rows.copy()
    every = np.arange(chain.units)
    cost = chain.recompute_seconds + np.maximum(chain.out_seconds, chain.in_seconds)
    order = (-cost[every, rows]).argsort(axis=1, kind="stable")
    for place in range(int((rows != KEEP).sum(axis=1).max(initial=0))):
        tried = rows.copy()
        tried[np.arange(len(rows)), order[:, place]] = KEEP
        fits = chain.fits(tried, limit_bytes)
        rows[fits] = tried[fits]
    return rows


def _exchanges(chain: Chain, choices: Choices, limit_bytes: float) -> Choices:
    """Return rows in which one unit that is evicted keeps, or takes another option, and another unit changes too."""
    evicted = np.flatnonzero(choices != KEEP)
    rows = []
    for first in evicted:
        for option in np.flatnonzero(chain.allowed[first]):
            if option == choices[first]:
                continue
            changed = choices.copy()
            changed[first] = option
            others = _single_changes(chain, changed)
            rows.append(others[others[:, first] == option])
    if not rows:
        return choices[None][:0]
    every = np.concatenate(rows)
    return every[:: max(len(every) // _EXCHANGES, 1)]
