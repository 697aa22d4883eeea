"""Particle swarm after HOME (He et al., IEEE Transactions on Computers 72(3), 2023, doi
10.1109/TC.2022.3180991).

Of HOME only the abstract is public: a particle swarm places every tensor (keep, swap, recompute)
    with the whole model in view, in
a reduced search space.  Encoding, decoder and constants are this project's, so it is not HOME's own
algorithm.  A particle holds
real keys: a priority for each unit, and a preference for each of its options.  Decoding evicts
    units by priority, each with its
preferred option, until the plan fits, so every particle that can fit does.  Units that cannot help
are not searched.  The update is the usual one, with inertia and attraction from Clerc and Kennedy
(IEEE Transactions on Evolutionary Computation 6(1), 2002).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.planner.chain import KEEP, Chain
from gpumemnet.planner.searches import Found

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
    """Search ``chain`` for the fastest plan whose regions stay within ``limit_bytes``.

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
