"""The record of a prediction, to compare it later with the observed memory.

The :class:`~service.api.predictions.PredictionApi` passes every prediction to a :class:`Recorder`,
which may count it, store it, or let the challenger predict the same job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.prediction import Prediction, PredictionTable


class PredictionRecord(NamedTuple):
    """One prediction as it was sent.

    Attributes:
        prediction_id: its id in the response.
        made_at_seconds: creation time, in seconds since the epoch.
        job: the job.
        estimate: the prediction, for ``estimate.gpu``.
        model_sha256: hash of the bundle that made it.
        release: name of the release that the bundle belongs to; empty when unknown.
    """

    prediction_id: str
    made_at_seconds: float
    job: TrainingJob
    estimate: Prediction
    model_sha256: str
    release: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RecordBatch(Sequence[PredictionRecord]):
    """Predictions made at once; single records are created on access.

    Attributes:
        prediction_ids: of each prediction.
        made_at_seconds, release: of all, as in :class:`PredictionRecord`.
        model_sha256s: of each prediction.
        jobs: the jobs; at least one.
        estimates: the predictions.
    """

    prediction_ids: Sequence[str]
    made_at_seconds: float
    jobs: JobTable
    estimates: PredictionTable
    model_sha256s: Sequence[str]
    release: str

    def __len__(self) -> int:
        return len(self.prediction_ids)

    @overload
    def __getitem__(self, index: int) -> PredictionRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[PredictionRecord]: ...

    def __getitem__(self, index: int | slice) -> PredictionRecord | list[PredictionRecord]:
        """One record, or a list of records for a slice; created on access."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._record(
            self.prediction_ids[index],
            self.jobs[index],
            self.estimates[index],
            self.model_sha256s[index],
        )

    def __iter__(self) -> Iterator[PredictionRecord]:
        return map(self._record, self.prediction_ids, self.jobs, self.estimates, self.model_sha256s)

    def _record(
        self, identity: str, job: TrainingJob, estimate: Prediction, model_sha256: str
    ) -> PredictionRecord:
        return PredictionRecord(
            identity, self.made_at_seconds, job, estimate, model_sha256, self.release
        )


class Recorder(Protocol):
    """Receives predictions."""

    def record(self, records: RecordBatch) -> None:
        """Record predictions; never blocks, never raises, and may drop some under load."""
        ...
