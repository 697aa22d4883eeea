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
    free_seconds = backward_start - forward_end - 2 * chain.copy_seconds[:, _SWAP]
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
    size = chain.copy_seconds[:, _SWAP]  # in proportion to the bytes that it copies
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


PARTICLES: Final = 48
ITERATIONS: Final = 80
_INERTIA: Final = 0.7298
_ATTRACTION: Final = 1.4962
_FASTEST: Final = 0.5
_PENALTY: Final = 10.0


def swarm(
    chain: Chain,
    limit_bytes: float,
    *,
    seed: int = 0,
    start: NDArray[np.int64] | None = None,
    iterations: int = ITERATIONS,
) -> Found:
    """Search ``chain`` for the fastest plan whose regions stay within ``limit_bytes``, by a particle
    swarm after HOME (He et al., IEEE Transactions on Computers 72(3), 2023, doi
    10.1109/TC.2022.3180991).

    Of HOME only the abstract is public: a particle swarm places every tensor (keep, swap,
    recompute) with the whole model in view, in a reduced search space.  Encoding, decoder and
    constants are this project's, so it is not HOME's own algorithm.  A particle holds real keys: a
    priority for each unit, and a preference for each of its options.  Decoding evicts units by
    priority, each with its preferred option, until the plan fits, so every particle that can fit
    does.  Units that cannot help are not searched.  The update is the usual one, with inertia and
    attraction from Clerc and Kennedy (IEEE Transactions on Evolutionary Computation 6(1), 2002).

    Args:
        chain: the chain.
        limit_bytes: the limit.
        seed: of the random numbers.
        start: a plan that one particle begins with, shape ``[n]``.
        iterations: number of updates.
    """
    random = np.random.default_rng(seed)
    searched = np.flatnonzero(chain.allowed[:, 1:].any(axis=1))
    if not len(searched):
        keep = chain.keep_all()
        return Found(keep if chain.fits(keep[None], limit_bytes)[0] else None)
    width = len(searched) * chain.allowed.shape[1]
    position = random.random((PARTICLES, width))
    for option in range(
        1, chain.allowed.shape[1]
    ):  # one particle prefers each option for all units
        position[option].reshape(len(searched), -1)[:, option] = 1
    if start is not None:
        position[0] = _keys_of(chain, searched, start)
    velocity = random.uniform(-_FASTEST, _FASTEST, (PARTICLES, width))
    own_best, own_fitness = position.copy(), np.full(PARTICLES, np.inf)
    best: NDArray[np.int64] | None = None
    best_seconds = np.inf
    for _ in range(iterations):
        choices = _decode(chain, limit_bytes, searched, position)
        seconds = chain.step_seconds(choices)
        fits = chain.fits(choices, limit_bytes)
        excess = np.maximum(chain.peak_bytes(choices) / max(limit_bytes, 1) - 1, 0)
        fitness = np.where(fits, seconds, seconds * (1 + _PENALTY * (1 + excess)))
        improved = fitness < own_fitness
        own_best[improved], own_fitness[improved] = position[improved], fitness[improved]
        first = int(np.argmin(np.where(fits, seconds, np.inf)))
        if fits[first] and seconds[first] < best_seconds:
            best, best_seconds = choices[first].copy(), float(seconds[first])
        leader = own_best[int(np.argmin(own_fitness))]
        to_own, to_leader = random.random((2, PARTICLES, width))
        velocity = _INERTIA * velocity + _ATTRACTION * (
            to_own * (own_best - position) + to_leader * (leader - position)
        )
        velocity = np.clip(velocity, -_FASTEST, _FASTEST)
        position = np.clip(position + velocity, 0, 1)
    return Found(best)


def _keys_of(
    chain: Chain, searched: NDArray[np.intp], choices: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return keys that decode to ``choices``, or to a part of their evictions."""
    keys = np.zeros((len(searched), chain.allowed.shape[1]))
    keys[:, KEEP] = (choices[searched] != KEEP).astype(float)
    evicted = np.flatnonzero(choices[searched] != KEEP)
    keys[evicted, choices[searched][evicted]] = 1
    return keys.ravel()


def _decode(
    chain: Chain, limit_bytes: float, searched: NDArray[np.intp], position: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the choices of every particle: the shortest prefix of its units, by priority, whose
    eviction fits."""
    keys = position.reshape(len(position), len(searched), -1)
    preferred = (
        np.where(chain.allowed[searched][None, :, 1:], keys[:, :, 1:], -1).argmax(axis=2) + 1
    )
    rank = (-keys[:, :, KEEP]).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    low, high = (
        np.zeros(len(position), dtype=np.int64),
        np.full(len(position), len(searched), dtype=np.int64),
    )

    def rows(count: NDArray[np.int64]) -> NDArray[np.int64]:
        choices = np.zeros((len(position), chain.units), dtype=np.int64)
        choices[:, searched] = np.where(rank < count[:, None], preferred, KEEP)
        return choices

    while (low < high).any():
        middle = (low + high) // 2
        fits = chain.peak_bytes(rows(middle)) <= limit_bytes
        high = np.where(fits, middle, high)
        low = np.where(fits, low, np.minimum(middle + 1, high))
    return rows(high)


REFERENCES: Final[Mapping[str, Callable[[Chain, float], Found]]] = {
    "capuchin": capuchin,
    "autoswap": autoswap,
    "every_block": every_block,
    "every_sqrt": every_sqrt,
    "vdnn_all": vdnn_all,
}
"""Name → rule from the literature, on the same costs as the planner's searches."""
FIXED: Final = frozenset({"every_block", "every_sqrt", "vdnn_all"})
"""Rules that do not look at the budget: their one plan fits or not."""
