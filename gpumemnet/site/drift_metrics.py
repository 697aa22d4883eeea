"""Drift as metrics, per family and GPU: a file in Prometheus' text format, for the textfile
collector of ``node_exporter``.

``gpumemnet drift`` runs from cron and ends before Prometheus can ask it, so it writes a file that
the machine's exporter reads. The file holds the time of the run, so that an alert can notice when
it is no longer renewed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import InvalidRequestError
from gpumemnet.site.drift import DriftReport, Finding


def write_drift_metrics(path: Path, report: DriftReport) -> None:
    """Write the metrics of ``report`` to ``path`` atomically: the collector sees the old file or
    the new one.

    Raises:
        InvalidRequestError: when the file cannot be written.
    """
    try:
        replace_file(path, drift_metrics(report, time.time()).encode())
    except OSError as error:
        raise InvalidRequestError(
            f"{path} cannot be written: {error.strerror}", "metrics"
        ) from None


def drift_metrics(report: DriftReport, now: float) -> str:
    """The text: one line for each family, GPU and kind of test, with the result of the most
    significant test.

    Args:
        report: of the run.
        now: seconds since the epoch.
    """
    gravest: dict[tuple[str, str, str], Finding] = {}
    jobs: dict[tuple[str, str], int] = {}
    for finding in report.findings:  # drift first, then the least likely
        gravest.setdefault((finding.family, finding.gpu or "", finding.kind), finding)
        key = finding.family, finding.gpu or ""
        jobs[key] = max(jobs.get(key, 0), finding.jobs)
    tests = [
        (dict(zip(("family", "gpu", "kind"), key, strict=True)), one)
        for key, one in sorted(gravest.items())
    ]
    metrics: list[tuple[str, str, Iterable[tuple[Mapping[str, str], float]]]] = [
        (
            "gpumemnet_drift_due",
            "1 when a retraining is due by the rule of gpumemnet drift",
            [({}, float(report.is_drift))],
        ),
        (
            "gpumemnet_drift",
            "1 when a test of this kind found drift, whether or not it starts a retraining",
            [(labels, float(one.is_drift)) for labels, one in tests],
        ),
        (
            "gpumemnet_drift_effect_ratio",
            "How far it is off: the median, a share of the jobs, or the distance of two distributions",
            [(labels, one.effect) for labels, one in tests],
        ),
        (
            "gpumemnet_drift_probability",
            "Of such an effect by chance, corrected for all tests of the run",
            [(labels, one.corrected) for labels, one in tests],
        ),
        (
            "gpumemnet_drift_jobs",
            "Newest jobs that were tested",
            [
                ({"family": family, "gpu": gpu}, float(count))
                for (family, gpu), count in sorted(jobs.items())
            ],
        ),
        (
            "gpumemnet_drift_last_run_timestamp_seconds",
            "When drift was last looked for",
            [({}, now)],
        ),
    ]
    return "".join(
        line for name, about, samples in metrics for line in _lines(name, about, samples)
    )


def _lines(
    name: str, about: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    yield f"# HELP {name} {about}\n# TYPE {name} gauge\n"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {_number(value)}\n" if inside else f"{name} {_number(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NaN"
