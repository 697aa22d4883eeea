"""Shadow mode: the challenger predicts a share of the champion's jobs in the background, so that
the two can be compared.

No request waits for it.  Jobs go into a short queue and are dropped when it is full.  The thread
sleeps after each job, so that it never takes more than a tenth of the processor time.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import Counter, Histogram

from gpumemnet.errors import GpumemnetError
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.predictor import Predictor

from .api.predictions import RecordBatch

if TYPE_CHECKING:
    from .observations.store import ObservationStore

QUEUE_LENGTH: Final = 256
MAX_BUSY_SHARE: Final = 0.1
"""Share of the processor time for background predictions."""

SHARE: Final = 0.1
"""Share of the predictions that the challenger predicts, too."""

_IDLE_SECONDS: Final = 0.5

SHADOWED: Final = Counter(
    "gpumemnet_shadow_predictions",
    "Predictions for the challenger: compared, failed, or dropped because too many were waiting.",
    ("outcome",),
)
SHADOW_DIFFERENCE: Final = Histogram(
    "gpumemnet_shadow_log_ratio",
    "Difference between challenger and champion: |ln(expected bytes of the one / of the other)|.",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
)

logger = logging.getLogger("gpumemnet.service")


class Challenger(NamedTuple):
    """A release that predicts beside the champion for comparison."""

    release: str
    predictor: Predictor
    sha256_of: Mapping[str, str]
    """Name of a model → hash of its bundle."""


class Shadow:
    """A :class:`~service.api.predictions.Recorder` that passes every prediction on, and lets the
    challenger predict a share of them.

    Args:
        store: stores the predictions of champion and challenger; ``None`` when nothing is stored.
        share: of the predictions that the challenger predicts, from 0 to 1.
    """

    def __init__(self, store: ObservationStore | None, share: float = SHARE) -> None:
        self._store = store
        self._share = share
        self._queue: queue.Queue[tuple[Challenger, RecordBatch, int]] = queue.Queue(QUEUE_LENGTH)
        self._challenger: Challenger | None = None
        self._encoders: Mapping[str, str] = {}
        for outcome in ("dropped", "compared", "failed"):
            SHADOWED.labels(outcome)

    @property
    def release(self) -> str | None:
        """The challenger's release; ``None`` without a challenger."""
        challenger = self._challenger
        return None if challenger is None else challenger.release

    def challenge(self, release: str, predictor: Predictor) -> None:
        """Use ``predictor`` as the challenger from now on."""
        hashes = {bundle.card.name: bundle.sha256 for bundle in predictor.bundles}
        self._challenger = Challenger(release, predictor, hashes)

    def withdraw(self) -> None:
        """Remove the challenger."""
        self._challenger = None

    def champion_is(self, bundles: Iterable[Bundle]) -> None:
        """Note the champion's encoders: the challenger predicts with the same encoder."""
        self._encoders = {bundle.sha256: bundle.card.encoder for bundle in bundles}

    def record(self, records: RecordBatch) -> None:
        """Pass predictions on, and queue a share of them for the challenger."""
        if self._store is not None:
            self._store.record(records)
        challenger = self._challenger
        if challenger is not None:
            for row in range(len(records)):
                if random.random() < self._share:
                    try:
                        self._queue.put_nowait((challenger, records, row))
                    except queue.Full:
                        SHADOWED.labels("dropped").inc()

    def compare_next(self) -> None:
        """Let the challenger predict the job that waits longest; call it again and again in a thread
        of its own."""
        try:
            challenger, records, row = self._queue.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            return
        began = time.thread_time()
        if challenger is self._challenger:
            self._predict(challenger, records, row)
        time.sleep((time.thread_time() - began) * (1 / MAX_BUSY_SHARE - 1))

    def _predict(self, challenger: Challenger, records: RecordBatch, row: int) -> None:
        prediction = records.estimates[row]
        outcome = "failed"
        try:
            estimate = challenger.predictor.predict(
                records.jobs[row],
                coverage=prediction.coverage,
                gpu=prediction.gpu,
                encoder=self._encoders.get(records.model_sha256),
            )
            SHADOW_DIFFERENCE.observe(
                abs(math.log(estimate.expected_bytes / prediction.expected_bytes))
            )
            if self._store is not None:
                self._store.record_shadow(
                    records.prediction_ids[row],
                    challenger.sha256_of[estimate.estimator],
                    estimate.expected_bytes,
                    estimate.safe_bytes,
                )
            outcome = "compared"
        except GpumemnetError:
            pass  # the challenger lacks the champion's coverage, encoder or family
        except Exception:
            logger.exception("the challenger %s failed", challenger.release)
        SHADOWED.labels(outcome).inc()
