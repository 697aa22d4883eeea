"""Draws the jobs of a recipe: spread over every feature and, in log-bytes, over memory.

A scrambled Sobol sequence (Owen 1998) fills the space; raking (iterative proportional fitting,
Deming & Stephan 1940) then weights its points so that every feature's tenths and every slice of
memory get their share, and systematic sampling draws from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError

from ..families import family
from .planned_job import (
    Options,
    PlannedJob,
    kernel_obstacle,
    operations_per_step,
    option_obstacle,
    rough_bytes,
)
from .recipe import Range, Recipe

MEMORY_SLICES: Final = 24
_POOL_FACTOR: Final = 8
_MIN_POOL_EXPONENT: Final = 12
_MAX_POOL_EXPONENT: Final = 19
_RAKING_ROUNDS: Final = 60
_TILTS: Final = (1.0, 2.0, 4.0, 8.0)
"""Exponents of the four quarters of the pool: one uniform, three biased towards large values.

Few uniform points need much memory."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Candidates with the cell of every dimension that each falls in; memory is the last
    dimension."""

    jobs: list[PlannedJob]
    estimates: NDArray[np.float64]
    cells: NDArray[np.int64]
    shares: list[tuple[float, ...]]


def sample_jobs(recipe: Recipe, count: int, seed: int, capacity_bytes: int) -> list[PlannedJob]:
    """``count`` distinct jobs that can train, in random order; the same for the same arguments.

    Args:
        recipe: the search space.
        count: how many.
        seed: of the sequence, the draw and the order.
        capacity_bytes: memory of the card, for the recipe's percentages.

    Raises:
        InvalidRequestError: when the space does not hold so many jobs between its memory limits.
    """
    if count < 1:
        raise InvalidRequestError("must be at least 1", "jobs")
    low = math.log2(recipe.memory_from.resolve(capacity_bytes))
    high = math.log2(recipe.memory_to.resolve(capacity_bytes))
    if high <= low:
        raise InvalidRequestError(
            f"recipe '{recipe.name}' spans no memory on this card: memory.to lies below memory.from",
            "memory",
        )
    exponent = max(_MIN_POOL_EXPONENT, math.ceil(math.log2(count * _POOL_FACTOR)))
    pool = _pool(recipe, exponent, seed, low, high)
    while len(pool.jobs) < 2 * count and exponent < _MAX_POOL_EXPONENT:
        exponent += 1
        smaller, pool = pool, _pool(recipe, exponent, seed, low, high)
        if len(pool.jobs) < 1.2 * len(smaller.jobs):
            break  # the space is exhausted
    if len(pool.jobs) < count:
        raise InvalidRequestError(
            f"recipe '{recipe.name}' gave only {len(pool.jobs)} distinct jobs that can train: widen its ranges or ask for fewer",
            "jobs",
        )
    generator = np.random.default_rng([seed, 1])
    chosen = _systematic(_inclusion(_weights(pool, count), count), pool.estimates, generator)
    return [pool.jobs[index] for index in generator.permutation(chosen)]


def _pool(recipe: Recipe, exponent: int, seed: int, low: float, high: float) -> _Pool:
    from scipy.stats import qmc

    names = [*recipe.features, *recipe.options]
    dimensions = [*recipe.features.values(), *recipe.options.values()]
    ranges = np.array([isinstance(dimension, Range) for dimension in dimensions])
    quarters: list[NDArray[np.float64]] = []
    for tilt in _TILTS:
        sobol = qmc.Sobol(
            len(dimensions), scramble=True, rng=np.random.default_rng([seed, 0, len(quarters)])
        )
        quarters.append(sobol.random_base2(exponent - 2) ** np.where(ranges, 1 / tilt, 1.0))
    points = np.minimum(np.concatenate(quarters), np.nextafter(1.0, 0.0))
    point_of: dict[PlannedJob, list[float]] = {}
    for point in points.tolist():
        values = {
            name: dimension.value(position)
            for name, dimension, position in zip(names, dimensions, point, strict=True)
        }
        planned = _compose(recipe, values)
        if planned is not None:
            point_of.setdefault(planned, point)
    found = {
        planned: estimate
        for planned in point_of
        if operations_per_step(planned) <= recipe.max_operations
        and low <= (estimate := math.log2(rough_bytes(planned))) < high
    }
    cells = [
        [
            *(
                dimension.cell(position)
                for dimension, position in zip(dimensions, point_of[planned], strict=True)
            ),
            int((estimate - low) / (high - low) * MEMORY_SLICES),
        ]
        for planned, estimate in found.items()
    ]
    shares = [dimension.shares for dimension in dimensions] + [(1 / MEMORY_SLICES,) * MEMORY_SLICES]
    shape = (len(found), len(shares))
    return _Pool(
        list(found),
        np.array(list(found.values())),
        np.array(cells, dtype=np.int64).reshape(shape),
        shares,
    )


def _compose(recipe: Recipe, values: dict[str, Any]) -> PlannedJob | None:
    """The job of one point, or ``None`` when it cannot train."""
    options = Options(**{name: values[name] for name in recipe.options})
    members = family(recipe.family)
    architecture = members.compose({name: values[name] for name in recipe.features})
    kernel = getattr(architecture, "attention_kernel", None)
    if (
        option_obstacle(options)
        or kernel_obstacle(kernel, options.precision)
        or members.obstacle(architecture, options.batch_size)
    ):
        return None
    return PlannedJob(recipe.family, architecture, options)


def _weights(pool: _Pool, count: int) -> NDArray[np.float64]:
    """Weights, shape ``[n_candidates]``: a mixture of weights even in the features and weights even
    in features and memory.

    Only wide networks fill a GPU, so no weights are even in both; the mixture is a compromise.
    """
    memory = len(pool.shares) - 1
    return 0.6 * _rake(pool, count, range(memory)) + 0.4 * _rake(pool, count, range(memory + 1))


def _rake(pool: _Pool, count: int, dimensions: range) -> NDArray[np.float64]:
    """Weights under which the cells of each of ``dimensions`` are as close to their shares as
    possible.

    No weight is above ``1 / count``: a job is drawn once, however rare its cell.
    """
    weights = np.full(len(pool.jobs), 1 / len(pool.jobs))
    for _ in range(_RAKING_ROUNDS):
        for dimension in dimensions:
            shares, cells = pool.shares[dimension], pool.cells[:, dimension]
            weights_by_cell = np.bincount(cells, weights, minlength=len(shares))
            factors = np.divide(
                shares, weights_by_cell, out=np.zeros(len(shares)), where=weights_by_cell > 0
            )
            weights = weights * factors[cells]
            weights /= weights.sum()
        weights = np.minimum(weights, 1 / count)
        weights /= weights.sum()
    return weights


def _inclusion(weights: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Probability of drawing each candidate, at most one, ``count`` in all."""
    certain = np.zeros(len(weights), dtype=bool)
    while True:
        remaining = count - int(certain.sum())
        free = np.where(certain, 0.0, weights)
        total = free.sum()
        if total <= 0:
            return _uniform_rest(certain, count)
        probabilities = np.where(certain, 1.0, free * remaining / total)
        over = probabilities > 1.0
        if not over.any():
            return probabilities
        certain |= over


def _uniform_rest(certain: NDArray[np.bool_], count: int) -> NDArray[np.float64]:
    """When the candidates with weight run out, the rest are equally likely."""
    rest = ~certain
    return np.where(certain, 1.0, (count - certain.sum()) / max(1, rest.sum()))


def _systematic(
    probabilities: NDArray[np.float64],
    order_by: NDArray[np.float64],
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Systematic draw along ``order_by``: equal steps through the cumulated probabilities, so the
    draw is even in memory."""
    order = np.argsort(order_by, kind="stable")
    edges = np.cumsum(probabilities[order])
    count = round(float(edges[-1]))
    ticks = (np.arange(count) + generator.random()) * (edges[-1] / count)
    picked = np.searchsorted(edges, ticks, side="right")
    indices: NDArray[np.int64] = order[np.minimum(picked, len(order) - 1)]
    return indices
