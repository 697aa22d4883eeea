"""The metrics of observations and of the stored predictions.

The gauges of coverage and error come from the database, so all workers report the same values.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

OBSERVED: Final = Counter(
    "gpumemnet_observations",
    "Observations stored, by the source of the peak and whether memory ran out",
    ["source", "oom"],
)
REFUSED: Final = Counter(
    "gpumemnet_observations_refused",
    "Observations that were not stored because the queue was full or the database unavailable",
    ["reason"],
)
PREDICTIONS: Final = Counter(
    "gpumemnet_predictions_kept",
    "Predictions for a later comparison: stored, or dropped because there were too many",
    ["outcome"],
)
QUEUE: Final = Gauge(
    "gpumemnet_observation_queue",
    "Observations that wait to be stored",
    multiprocess_mode="livesum",
)
DATABASE_UP: Final = Gauge(
    "gpumemnet_database_up",
    "1 when the last write to the database succeeded, else 0",
    multiprocess_mode="livemin",
)
COVERAGE: Final = Gauge(
    "gpumemnet_observed_coverage_ratio",
    "Share of the last observations of a family that stayed within the safe bytes",
    ["family"],
    multiprocess_mode="livemostrecent",
)
PROMISED: Final = Gauge(
    "gpumemnet_promised_coverage_ratio",
    "Mean requested coverage of the same jobs",
    ["family"],
    multiprocess_mode="livemostrecent",
)
ERROR: Final = Gauge(
    "gpumemnet_observed_error_ratio",
    "Median of (expected - observed) / observed over the last observations of a family",
    ["family"],
    multiprocess_mode="livemostrecent",
)
ALARM: Final = Gauge(
    "gpumemnet_coverage_alarm",
    "1 when the observed coverage of a family is significantly too low (exact test)",
    ["family"],
    multiprocess_mode="livemostrecent",
)
