"""What the service keeps of a prediction, so that an observation can be compared with it later.

The :class:`~service.answers.Answerer` hands every prediction to a :class:`Recorder`; who stores it, or asks another model the
same, is none of its business.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gpumemnet.estimate import Estimate
from gpumemnet.job import TrainingJob


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


class Recorder(Protocol):
    """Takes note of predictions."""

    def record(self, record: PredictionRecord) -> None:
        """Take note of one; never blocks, never raises, and may forget it when there are too many."""
        ...
