"""SchedTune (Albahar et al., CCGrid 2022): a random forest over sizes of the model and features of
the GPU.

It learns from measured jobs, so it answers by folds: never for an architecture family that it was
fitted on.  Features are those
of its repository: megabytes of activations, parameters and input, and of the GPU memory bandwidth,
CUDA cores and
multiprocessors.  Its estimate is the prediction times one plus the largest error.  Assumed:
activations are those of the whole batch; the largest error is the largest relative under-prediction
of rows outside each tree's sample, because a forest's errors on its own rows say little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor

from gpumemnet.gpu import device_profile
from gpumemnet.job.measurement import Measurement
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.units import MIB

Array = NDArray[np.float64]
TREES: Final = 100
HARDWARE: Final[Mapping[str, tuple[float, int]]] = {
    "NVIDIA A100-SXM4-40GB": (1_555, 6_912),
    "NVIDIA GeForce RTX 3060": (360, 3_584),
    "NVIDIA GeForce RTX 4060": (272, 3_072),
}
"""GPU → memory bandwidth in GB/s and CUDA cores, from NVIDIA's data sheets."""


def features(rows: Sequence[Measurement]) -> Array:
    """SchedTune's features, shape ``[B, 6]``."""
    return np.array([_features(row) for row in rows], dtype=np.float64)


def _features(row: Measurement) -> tuple[float, ...]:
    job, element = row.job, ELEMENT_BYTES[row.job.precision]
    bandwidth, cores = HARDWARE[row.gpu]
    return (
        (job.total_activations or 0) * job.batch_size * element.activation / MIB,
        (job.total_parameters or 0) * element.weight / MIB,
        job.input_elements * job.batch_size * element.inputs / MIB,
        bandwidth,
        cores,
        device_profile(row.gpu).multiprocessors,
    )


def fit_schedtune(
    training: Sequence[Measurement], label_bytes: Array, seed: int = 0
) -> Callable[[Sequence[Measurement]], tuple[Array, Array]]:
    """Fit the forest; return the function that gives prediction and SchedTune's estimate for other
    rows, shape ``[B]`` each.

    Args:
        training: jobs that ended well.
        label_bytes: their memory, shape ``[B]``.
        seed: of the forest.
    """
    forest = RandomForestRegressor(n_estimators=TREES, oob_score=True, random_state=seed)
    forest.fit(features(training), label_bytes / MIB)
    outside = np.asarray(forest.oob_prediction_) * MIB
    seen = outside > 0
    largest = float(np.max(label_bytes[seen] / outside[seen] - 1.0, initial=0.0))

    def predict(rows: Sequence[Measurement]) -> tuple[Array, Array]:
        predicted: Array = forest.predict(features(rows)) * MIB
        return predicted, predicted * (1.0 + largest)

    return predict
