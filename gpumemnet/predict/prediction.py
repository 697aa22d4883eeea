"""What an estimator answers for one job, and the interface that every estimator shares.

Classifier, trace and published formula all map jobs to memory in the same terms, so that a report can put them into one table and
a scheduler can swap them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from gpumemnet.predict.bins import BinScheme

if TYPE_CHECKING:
    from gpumemnet.job.job_table import JobTable
    from gpumemnet.predict.prediction_table import PredictionTable

DEFAULT_COVERAGE: Final = 0.99


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """The memory that one job is expected to take, in ``nvidia-smi`` terms (CUDA context included).

    Attributes:
        expected_bytes: centre of the predicted distribution: about as often too low as too high.
        safe_bytes: upper bound that holds with ``coverage``; ``None`` outside the model's support.
        coverage: the coverage asked for.
        bins: the bin scheme of ``probabilities``.
        probabilities: probability of every bin, shape ``[bins.count]``, sums to one.
        in_support: whether the job resembles those that the model was trained and calibrated on.
        reasons: why it does not, one sentence each; empty inside the support.
        gpu: the GPU model that the amounts are for.
        estimator: name of the estimator.
        version: version of the estimator.
        label_source: what the estimator learnt from: readings of a GPU (``nvml_…``, ``nvidia_smi_…``), or ``traced``.
    """

    expected_bytes: int
    safe_bytes: int | None
    coverage: float
    bins: BinScheme
    probabilities: NDArray[np.float64]
    in_support: bool
    reasons: tuple[str, ...]
    gpu: str
    estimator: str
    version: str
    label_source: str

    @property
    def bin_index(self) -> int:
        """The most probable bin."""
        return int(self.probabilities.argmax())

    @property
    def bin_bounds_bytes(self) -> tuple[int, int | None]:
        """Edges of the most probable bin; the last bin is open above."""
        return self.bins.bounds_bytes(self.bin_index)


class Estimator(Protocol):
    """Anything that maps jobs to memory."""

    def predict_table(
        self, jobs: JobTable, *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE
    ) -> PredictionTable:
        """One prediction per job, in order.

        Raises:
            InvalidRequestError: when the coverage is one that the estimator cannot give.
            UnsupportedJobError: when the estimator has no answer for a job's family.
        """
        ...
