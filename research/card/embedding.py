"""Two-dimensional projections of a dataset's jobs: principal components, and t-SNE (van der Maaten
& Hinton, JMLR 9, 2008).

Both are implemented in numpy, because measuring hosts have no scikit-learn.  t-SNE is exact,
quadratic in the number of points, and intended for about a thousand points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.features import feature_matrix
from gpumemnet.units import MIB

Matrix = NDArray[np.float64]

PERPLEXITY: Final = 30.0
_WORKSPACE_BYTES: Final = 8 * MIB
_ROUNDS: Final = 500
_EXAGGERATED_ROUNDS: Final = 125
_EXAGGERATION: Final = 12.0
_ENTROPY_ROUNDS: Final = 60


def standardised_features(jobs: Sequence[TrainingJob]) -> Matrix:
    """Feature vectors in logarithms, each column with mean zero and variance one; constant columns
    are left out.

    Shape ``[B, F]`` with ``F`` at least one.
    """
    columns = np.log1p(np.maximum(feature_matrix(JobTable.from_jobs(jobs), _WORKSPACE_BYTES), 0.0))
    deviation = columns.std(axis=0)
    varied = deviation > 1e-9
    if not varied.any():
        return np.zeros((len(jobs), 1))
    scaled: Matrix = (columns[:, varied] - columns[:, varied].mean(axis=0)) / deviation[varied]
    return scaled


def principal_components(points: Matrix) -> tuple[Matrix, Matrix]:
    """The first two principal components of centred ``points``, shape ``[B, 2]``, and the share of
    variance of each."""
    rotated, strengths, _ = np.linalg.svd(points, full_matrices=False)
    components = np.zeros((len(points), 2))
    shares = np.zeros(2)
    count = min(2, len(strengths))
    components[:, :count] = rotated[:, :count] * strengths[:count]
    shares[:count] = strengths[:count] ** 2 / max(float((strengths**2).sum()), 1e-12)
    return components, shares


def tsne(points: Matrix, seed: int, perplexity: float = PERPLEXITY) -> Matrix:
    """Exact t-SNE of ``points``, shape ``[B, 2]``: initialised by principal components, the same
    for the same seed.

    Args:
        points: shape ``[B, F]``; fewer than four points keep their principal components.
        seed: seed of the jitter that separates equal points.
        perplexity: effective number of neighbours, at most a third of the points.
    """
    start = principal_components(points - points.mean(axis=0))[0]
    count = len(points)
    if count < 4:
        return start
    affinities = _affinities(_squared_distances(points), min(perplexity, (count - 1) / 3))
    position = start / max(float(start[:, 0].std()), 1e-12) * 1e-4
    position += np.random.default_rng(seed).normal(scale=1e-6, size=position.shape)
    rate = max(count / _EXAGGERATION / 4, 50.0)
    velocity, gains = np.zeros_like(position), np.ones_like(position)
    for step in range(_ROUNDS):
        closeness = 1.0 / (1.0 + _squared_distances(position))
        np.fill_diagonal(closeness, 0.0)
        attraction = affinities * _EXAGGERATION if step < _EXAGGERATED_ROUNDS else affinities
        force = (attraction - closeness / closeness.sum()) * closeness
        gradient = 4.0 * (force.sum(axis=1)[:, None] * position - force @ position)
        same = np.sign(gradient) == np.sign(velocity)
        gains = np.maximum(np.where(same, gains * 0.8, gains + 0.2), 0.01)
        velocity = (0.5 if step < _EXAGGERATED_ROUNDS else 0.8) * velocity - rate * gains * gradient
        position = position + velocity
        position -= position.mean(axis=0)
    return position


def _squared_distances(points: Matrix) -> Matrix:
    lengths = (points**2).sum(axis=1)
    distances: Matrix = np.maximum(
        lengths[:, None] + lengths[None, :] - 2.0 * points @ points.T, 0.0
    )
    return distances


def _affinities(distances: Matrix, perplexity: float) -> Matrix:
    """Symmetric neighbour probabilities; every point's bandwidth is bisected until its entropy is
    ``log(perplexity)``."""
    count = len(distances)
    others = ~np.eye(count, dtype=bool)
    shifted = distances - np.where(others, distances, np.inf).min(axis=1, keepdims=True)
    low, high, precision = (
        np.zeros(count),
        np.full(count, np.inf),
        np.full(count, 1.0 / max(float(distances.mean()), 1e-12)),
    )
    for _ in range(_ENTROPY_ROUNDS):
        weights = np.where(others, np.exp(-np.maximum(shifted, 0.0) * precision[:, None]), 0.0)
        total = weights.sum(axis=1)
        entropy = np.log(total) + precision * (shifted * weights).sum(axis=1) / total
        wide = entropy > np.log(perplexity)
        low, high = np.where(wide, precision, low), np.where(wide, high, precision)
        precision = np.where(np.isinf(high), precision * 2.0, (low + high) / 2.0)
    probabilities = weights / total[:, None]
    symmetric: Matrix = np.maximum((probabilities + probabilities.T) / (2.0 * count), 1e-12)
    return symmetric
