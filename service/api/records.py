"""What the service keeps of a prediction, so that an observation can be compared with it later.

The :class:`~service.api.answers.Answerer` hands every prediction to a :class:`Recorder`; who stores it, or asks another model the
same, is none of its business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.estimate import Estimate
from gpumemnet.predict.estimates import Estimates


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
    estimate: Estimate
    model_sha256: str
    release: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RecordBatch(Sequence[PredictionRecord]):
    """Predictions of one model for jobs of one family, made at once; single records are built where somebody asks for one.

    Attributes:
        prediction_ids: of each.
        made_at_seconds, model_sha256, release: of all, as :class:`PredictionRecord` has them.
        jobs: what was asked about; at least one.
        estimates: what was answered.
    """

    prediction_ids: Sequence[str]
    made_at_seconds: float
    jobs: Sequence[TrainingJob]
    estimates: Estimates
    model_sha256: str
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
        return self._record(self.prediction_ids[index], self.jobs[index], self.estimates[index])

    def __iter__(self) -> Iterator[PredictionRecord]:
        return map(self._record, self.prediction_ids, self.jobs, self.estimates)

    @property
    def family(self) -> str:
        """The family of the jobs."""
        return self.jobs[0].family

    def _record(self, identity: str, job: TrainingJob, estimate: Estimate) -> PredictionRecord:
        return PredictionRecord(identity, self.made_at_seconds, job, estimate, self.model_sha256, self.release)


class Recorder(Protocol):
    """Takes note of predictions."""

    def record(self, record: PredictionRecord) -> None:
        """Take note of one; never blocks, never raises, and may forget it when there are too many."""
        ...

    def record_many(self, records: RecordBatch) -> None:
        """Take note of many; as :meth:`record`, and builds none of them before it has to."""
        ...
