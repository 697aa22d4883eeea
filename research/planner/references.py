"""Rules from the literature, on the same costs as the searches: what a plan is compared with.

They are the published rules applied to units, not the published systems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.planner.chain import KEEP, OPTIONS, Chain
from gpumemnet.planner.plans import Decision
from gpumemnet.planner.searches import Found

_RECOMPUTE = OPTIONS.index(Decision.RECOMPUTE)
_SWAP = OPTIONS.index(Decision.SWAP)


def every_block(chain: Chain, limit_bytes: float) -> Found:
    """Recompute every unit, as ``gradient_checkpointing_enable`` of transformers does (Chen et al.,
    arXiv 1604.06174)."""
    return _fixed(chain, limit_bytes, _RECOMPUTE, lambda unit: True)


def every_sqrt(chain: Chain, limit_bytes: float) -> Found:
    """Recompute every unit but each √n-th, which keeps what it saved."""
    stride = max(math.isqrt(chain.units), 1)
    return _fixed(chain, limit_bytes, _RECOMPUTE, lambda unit: unit % stride != 0)


def vdnn_all(chain: Chain, limit_bytes: float) -> Found:
    """Swap every unit (vDNN, Rhu et al., MICRO 2016, arXiv 1602.08124)."""
    return _fixed(chain, limit_bytes, _SWAP, lambda unit: True)


def vdnn_convolutions(chain: Chain, limit_bytes: float) -> Found:
    """Swap every unit that has convolutions (vDNN)."""
    return _fixed(chain, limit_bytes, _SWAP, lambda unit: chain.convolves[unit])


def _fixed(chain: Chain, limit_bytes: float, option: int, applies: Callable[[int], bool]) -> Found:
    choices = chain.keep_all()
    for unit in range(chain.units):
        if chain.allowed[unit, 1:].any() and applies(unit):
            choices[unit] = option
    return _checked(chain, limit_bytes, choices)


def _checked(chain: Chain, limit_bytes: float, choices: NDArray[np.int64]) -> Found:
    return Found(choices if chain.fits(choices[None], limit_bytes)[0] else None)


def capuchin(chain: Chain, limit_bytes: float) -> Found:
    """Swap by free time while copies stay hidden, then take the cheaper of both (Capuchin, Peng et
    al., ASPLOS 2020).

    The free time of a unit lies between its passes, without its copies.  What is left to free is
    recomputed, most bytes for each second first, unless swapping costs less.
    """
    forward_end, backward_start = _times(chain)
    free_seconds = (
        backward_start - forward_end - chain.out_seconds[:, _SWAP] - chain.in_seconds[:, _SWAP]
    )
    may = np.asarray(chain.allowed[:, 1:].any(axis=1))
    choices = chain.keep_all()
    for unit in np.argsort(-free_seconds, kind="stable"):
        if chain.fits(choices[None], limit_bytes)[0]:
            return Found(choices)
        if may[unit] and free_seconds[unit] >= 0:
            tried = choices.copy()
            tried[unit] = _SWAP
            if chain.step_seconds(tried[None])[0] <= chain.step_seconds(choices[None])[0] * (
                1 + 1e-9
            ):
                choices = tried
    saved = chain.gone_bytes.max(axis=2)
    per_second = saved[:, _RECOMPUTE] / np.maximum(chain.recompute_seconds[:, _RECOMPUTE], 1e-12)
    for unit in np.argsort(-per_second, kind="stable"):
        if chain.fits(choices[None], limit_bytes)[0]:
            return Found(choices)
        if may[unit] and choices[unit] == KEEP:
            rows = np.repeat(choices[None], 2, axis=0)
            rows[:, unit] = _RECOMPUTE, _SWAP
            choices = rows[int(np.argmin(chain.step_seconds(rows)))]
    return _checked(chain, limit_bytes, choices)


def autoswap(chain: Chain, limit_bytes: float) -> Found:
    """Swap by AutoSwap's scores, the fastest of the plans of three scores (Zhang et al., arXiv
    1903.06631).

    The scores are a unit's duration of absence, its area of absence (with its bytes), and its area
    weighted by the memory in use meanwhile.  AutoSwap tunes a mixture of them by Bayesian
    optimization.
    """
    forward_end, backward_start = _times(chain)
    absence = backward_start - forward_end
    size = chain.out_seconds[:, _SWAP]  # in proportion to the bytes that it copies
    weight = (chain.gone_bytes[:, _SWAP] > 0) @ (chain.live_bytes / chain.live_bytes.max())
    may = np.asarray(chain.allowed[:, 1:].any(axis=1))
    best: NDArray[np.int64] | None = None
    best_seconds = np.inf
    for score in (absence, absence * size, size * weight):
        choices = chain.keep_all()
        for unit in np.argsort(-score, kind="stable"):
            if chain.fits(choices[None], limit_bytes)[0]:
                break
            if may[unit]:
                choices[unit] = _SWAP
        seconds = float(chain.step_seconds(choices[None])[0])
        if chain.fits(choices[None], limit_bytes)[0] and seconds < best_seconds:
            best, best_seconds = choices, seconds
    return Found(best)


def _times(chain: Chain) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when each unit's forward pass ends and when its backward pass starts, if everything is
    kept."""
    forward_end = np.cumsum(chain.forward_seconds)
    turn = forward_end[-1] + chain.turn_forward_seconds + chain.turn_backward_seconds
    order = list(chain.backward_order)
    backward_start = np.zeros(chain.units)
    backward_start[order] = turn + np.concatenate(
        [[0.0], np.cumsum(chain.backward_seconds[order])[:-1]]
    )
    return forward_end, backward_start


REFERENCES: Final[Mapping[str, Callable[[Chain, float], Found]]] = {
    "capuchin": capuchin,
    "autoswap": autoswap,
    "every_block": every_block,
    "every_sqrt": every_sqrt,
    "vdnn_all": vdnn_all,
    "vdnn_convolutions": vdnn_convolutions,
}
"""Name → rule from the literature, on the same costs as the planner's searches."""
FIXED: Final = frozenset({"every_block", "every_sqrt", "vdnn_all", "vdnn_convolutions"})
"""Rules that do not look at the budget: their one plan fits or not."""
