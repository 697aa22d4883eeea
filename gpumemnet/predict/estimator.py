"""The interface of all estimators.

Classifiers, the trace and published formulas return the same type.  A report can therefore compare
them, and a scheduler can replace one by another.
"""

from __future__ import annotations

from typing import Protocol

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.bins import BinScheme
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.predict.prediction_table import PredictionTable


class Estimator(Protocol):
    """Interface of everything that predicts the memory of jobs."""

    def predict_table(
        self, jobs: JobTable, *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE
    ) -> PredictionTable:
        """Returns one prediction per job, in order.

        Raises:
            InvalidRequestError: when the estimator does not offer the coverage.
            UnsupportedJobError: when the estimator does not support a job's family.
        """
        ...
