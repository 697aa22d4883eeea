"""What the service keeps of a prediction, so that an observation can be compared with it later.

The :class:`~service.api.answers.Answerer` hands every prediction to a :class:`Recorder`; who stores it, or asks another model the
same, is none of its business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.prediction_table import PredictionTable


class PredictionRecord(NamedTuple):
    """One prediction as it was answered.

    Attributes:
        prediction_id: its id, as the answer says it.
        made_at_seconds: when, in seconds since the epoch.
        job: what was asked about.
        estimate: what was answered, for ``estimate.gpu``.
        model_sha256: hash of the bundle that answered.
        release: name of the release that the bundle belongs to; empty where nobody knows.
    """

    prediction_id: str
    made_at_seconds: float
    job: TrainingJob
    estimate: Prediction
    model_sha256: str
    release: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RecordBatch(Sequence[PredictionRecord]):
    """Predictions made at once; single records are built where somebody asks for one.

    Attributes:
        prediction_ids: of each.
        made_at_seconds, release: of all, as :class:`PredictionRecord` has them.
        model_sha256s: of each.
        jobs: what was asked about; at least one.
        estimates: what was answered.
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
        """One record, built now, or a list of some."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._record(self.prediction_ids[index], self.jobs[index], self.estimates[index], self.model_sha256s[index])

    def __iter__(self) -> Iterator[PredictionRecord]:
        return map(self._record, self.prediction_ids, self.jobs, self.estimates, self.model_sha256s)

    def _record(self, identity: str, job: TrainingJob, estimate: Prediction, model_sha256: str) -> PredictionRecord:
        return PredictionRecord(identity, self.made_at_seconds, job, estimate, model_sha256, self.release)


class Recorder(Protocol):
    """Takes note of predictions."""

    def record(self, records: RecordBatch) -> None:
        """Take note of predictions; never blocks, never raises, and may forget some when there are too many."""
        ...
