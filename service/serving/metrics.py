"""Prometheus metrics of the served models: the release, the number of changes, and the challenger's
distance from the champion.

With several workers in one container, a gauge is the number of live workers for which it holds.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

MODEL_INFO: Final = Gauge(
    "gpumemnet_model_info",
    "Workers that serve the release; sha256 is a shortened hash over its bundles.",
    ("release", "sha256"),
    multiprocess_mode="livesum",
)
STALE: Final = Gauge(
    "gpumemnet_champion_stale",
    "Workers that do not serve the registry's champion, because it cannot be loaded or failed its self-test.",
    multiprocess_mode="livesum",
)
SWAPS: Final = Counter("gpumemnet_champion_swaps", "Changes of the release that a worker serves.")
FAILED_LOADS: Final = Counter(
    "gpumemnet_release_load_failures",
    "Releases that could not be loaded or failed their self-test.",
    ("alias",),
)
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

for _alias in ("champion", "challenger"):
    FAILED_LOADS.labels(_alias)
for _outcome in ("compared", "failed", "dropped"):
    SHADOWED.labels(_outcome)
