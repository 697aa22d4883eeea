"""Random chains, small enough to try every plan."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from gpumemnet.planner.chain import KEEP, OPTIONS, Chain, SharedStorages
from gpumemnet.planner.plans import Decision


def random_chain(
    seed: int, units: int, options: int = len(OPTIONS), *, equal: bool = False
) -> Chain:
    """A chain of ``units``, equal ones if wanted, each with the first ``options`` options but the
    last unit, which keeps."""
    random = np.random.default_rng(seed)
    n, o = units, len(OPTIONS)
    saved, inputs = random.integers(2, 60, n).astype(float), random.integers(1, 8, n).astype(float)
    forward = random.uniform(1, 10, n)
    if equal:
        saved, inputs, forward = (np.full(n, values[0]) for values in (saved, inputs, forward))
    bandwidth = random.choice([0.5, 3.0, 30.0])
    allowed = np.zeros((n, o), dtype=bool)
    allowed[:, KEEP] = True
    allowed[:-1, 1:options] = equal | (random.random((n - 1, options - 1)) < 0.9)
    recompute, moved, resident = np.zeros((n, o)), np.zeros((n, o)), np.zeros((n, o))
    for column, option in enumerate(OPTIONS):
        share = 0.3 if option is Decision.RECOMPUTE_CHEAP else 1.0
        recompute[:, column] = forward * share if option.recomputes else 0
        moved[:, column] = {Decision.SWAP: saved, Decision.RECOMPUTE_AND_SWAP_INPUT: inputs}.get(
            option, np.zeros(n)
        )
        left = {Decision.KEEP: saved + inputs, Decision.RECOMPUTE: inputs, Decision.SWAP: inputs}
        left[Decision.RECOMPUTE_CHEAP] = saved * 0.5
        resident[:, column] = left.get(option, np.zeros(n))
    regions = 2 * n
    gone = np.zeros((n, o, regions))
    live = np.zeros(regions)
    for unit in range(n):
        alive = slice(unit, regions - unit)
        live[alive] += saved[unit] + inputs[unit]
        gone[unit, :, unit + 1 : regions - unit - 1] = (
            saved[unit] + inputs[unit] - resident[unit]
        )[:, None]
        gone[unit, 1, regions - unit - 1] = -1.5 if equal else -random.uniform(0, 3)
    shared = tuple(
        SharedStorages(
            (unit, unit + 1),
            np.array([[False] + [True] * (o - 1)] * 2),
            5.0,
            live > np.median(live),
        )
        for unit in range(0, 0 if equal else n - 2, 3)
    )
    return Chain(
        allowed=allowed,
        forward_seconds=forward,
        backward_seconds=2 * forward,
        turn_forward_seconds=2.0,
        turn_backward_seconds=3.0,
        other_seconds=4.0,
        recompute_seconds=recompute,
        copy_seconds=moved / bandwidth,
        host_bytes=moved,
        backward_order=tuple(reversed(range(n))),
        live_bytes=live + 10 * len(shared),
        gone_bytes=gone,
        shared=shared,
        host_limit_bytes=float(random.choice([30, 1000])),
    )


def every_plan(chain: Chain) -> NDArray[np.int64]:
    """All plans of a chain, one a row."""
    return np.array(list(product(*(np.flatnonzero(row) for row in chain.allowed))), dtype=np.int64)


def limit_between(chain: Chain, share: float) -> float:
    """A limit between the memory of two plans: of the smallest and the next at 0, above that of all
    plans at 1."""
    peaks = np.unique(np.round(chain.peak_bytes(every_plan(chain)), 3))
    index = int(share * (len(peaks) - 1))
    return float(
        peaks[index] + (peaks[index + 1] - peaks[index] if index + 1 < len(peaks) else 1.0) / 2
    )
