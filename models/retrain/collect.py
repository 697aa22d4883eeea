"""Collects the rows to learn from, out of datasets and exported observations; refuses rows that
cannot be true.

A row is refused if its numbers contradict physics or each other
(:mod:`gpumemnet.site.implausible_rows`).

Three kinds of rows are told apart.  Architectures that the hash of their key chooses are held out:
always and on every machine, so no retraining trains on them.  The newest observations are for
judging, too.  All others are trained on.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import Dataset, read_dataset
from gpumemnet.job.job_files import file_sha256
from gpumemnet.job.job_table import Array, Flags, Indices
from gpumemnet.job.measurement import IDENTITY, OBSERVED, job_texts
from gpumemnet.physics.replicas import WITH_OTHERS
from gpumemnet.site.implausible_rows import implausible_rows
from gpumemnet.site.observations import ended_at

from ..training.data import ZOO, LabelledJobs, is_usable, labelled_jobs

REFUSING_RULES: Final = frozenset(
    {
        *("below-weights", "below-training-state", "reserved-above-label"),
        *("reserved-above-process", "allocated-above-reserved", "above-capacity"),
        *("device-far-from-process", "oom-without-capacity"),
    }
)
"""Rules of :mod:`gpumemnet.site.implausible_rows` that refuse a row.  ``below-floor`` is not
among them, as it compares a row with others and would refuse the smallest jobs."""
HELD_OUT_SHARE: Final = 0.15
HELD_OUT_RULE: Final = f"sha256('held-out/1 ' + architecture_key) < {HELD_OUT_SHARE:g}"
"""The rule as cards state it; a bundle with another rule, or none, may have been trained on these
rows."""
NEWEST_SHARE: Final = 0.2
"""Share of the observations, the newest, that no candidate is trained on."""


@dataclass(frozen=True)
class InputFile:
    """One file that was read, with the number of its rows and of those that are used."""

    name: str
    sha256: str
    rows: int
    used: int


@dataclass(frozen=True)
class Refusal:
    """Rows of one file that are not used, with the reason."""

    file: str
    rows: int
    reason: str


@dataclass(frozen=True, eq=False)
class Collected:
    """The ``B`` rows to learn from.

    Attributes:
        data: the rows; their sources are the names of the files.
        is_held_out: whether the row's architecture is held out, shape ``[B]``.
        is_newest: whether the row is one of the newest observations, shape ``[B]``.
        observed_at: when the job ended, in seconds since 1970; NaN unless it is an observation that
            says so, shape ``[B]``.
        files: the files that were read.
        refusals: the rows that were refused.
    """

    data: LabelledJobs
    is_held_out: Flags
    is_newest: Flags
    observed_at: Array
    files: tuple[InputFile, ...]
    refusals: tuple[Refusal, ...]

    @property
    def is_training(self) -> Flags:
        """Whether the row is trained on, shape ``[B]``."""
        return ~(self.is_held_out | self.is_newest)

    @property
    def is_observed(self) -> Flags:
        """Whether the row is an observation, shape ``[B]``."""
        return self.data.provenances == OBSERVED

    @property
    def learned_until(self) -> float | None:
        """Time of the newest observation that is trained on."""
        times = self.observed_at[self.is_training & ~np.isnan(self.observed_at)]
        return float(times.max()) if len(times) else None


def collect(
    datasets: Sequence[Path],
    observations: Sequence[Path] = (),
    champion_until: float | None = None,
) -> Collected:
    """Read the files in their order; of several rows of the same job, options, GPU and software the
    first is used, of several observed runs of a job the newest.

    Args:
        datasets, observations: the files.
        champion_until: time of the newest observation that the champion was trained on; earlier
            ones are not for judging.

    Raises:
        DatasetError: when a file is missing, damaged or of another schema, or all of them together
            hold nothing to learn from.
    """
    parts: list[tuple[Dataset, LabelledJobs]] = []
    files: list[InputFile] = []
    refusals: list[Refusal] = []
    names: dict[str, str] = {}
    for path in (*datasets, *observations):
        rows = read_dataset(path)
        sha256 = file_sha256(path)
        if sha256 in names:
            refusals.append(Refusal(path.name, len(rows), f"the same file as {names[sha256]}"))
            continue
        if path in observations and (rows.words("provenance") != OBSERVED).any():
            raise DatasetError(f"{path} holds rows that no site has observed: give it as a dataset")
        if not len(rows):
            refusals.append(Refusal(path.name, 0, "holds no row"))
        name = path.name if path.name not in names.values() else str(path)
        names[sha256] = name
        kept, reasons = _plausible_rows(rows)
        found = labelled_jobs(kept, name)
        if found is not None:
            found = replace(found, files={name: sha256})
            parts.append((kept, found))
        refusals += [Refusal(name, count, reason) for reason, count in reasons.items()]
        files.append(InputFile(name, sha256, len(rows), 0 if found is None else len(found)))
    if not sum(len(data) for _, data in parts):
        given = ", ".join(path.name for path in (*datasets, *observations)) or "no file"
        raise DatasetError(f"{given}: no row to learn from")
    rows = Dataset.concatenate([one for one, _ in parts])
    data = LabelledJobs.concatenate([one for _, one in parts])
    # Of measurements of the same job and options on the same GPU model and software, the first.
    columns = map(rows.words, ("label_source", *IDENTITY))
    first = _first_of_each(zip(job_texts(rows.jobs), *columns, strict=True))
    if len(first) < len(rows):
        reason = "the same job again, on the same GPU and software"
        refusals.append(Refusal("all files", len(rows) - len(first), reason))
    return _split(rows.take(first), data.take(first), champion_until, files, refusals)


def _split(
    rows: Dataset,
    data: LabelledJobs,
    champion_until: float | None,
    files: Sequence[InputFile],
    refusals: Sequence[Refusal],
) -> Collected:
    is_observed = data.provenances == OBSERVED
    times = np.where(is_observed, [*map(ended_at, rows.words("options"))], np.nan)
    after = newest_after(times[~np.isnan(times)], champion_until)
    is_newest = times > (math.inf if after is None else after)
    is_held_out = np.array([is_held_out_key(key) for key in rows.keys]) & ~is_newest
    # A job that runs every hour must not outweigh the others.
    keys = [
        (text, newest) if observed else row
        for row, (text, newest, observed) in enumerate(
            zip(job_texts(rows.jobs), is_newest.tolist(), is_observed.tolist(), strict=True)
        )
    ]
    by_time = np.argsort(-np.nan_to_num(times), kind="stable")
    chosen = np.sort(by_time[_first_of_each(keys[row] for row in by_time.tolist())])
    return Collected(
        data.take(chosen),
        is_held_out[chosen],
        is_newest[chosen],
        times[chosen],
        tuple(files),
        tuple(refusals),
    )


def _first_of_each(keys: Iterable[object]) -> Indices:
    """Positions of the first of equal keys."""
    return np.flatnonzero(~pd.Series([*keys], dtype=object).duplicated())


def _plausible_rows(rows: Dataset) -> tuple[Dataset, Counter[str]]:
    """The rows that can be true and trained on, and the number of the others for each reason."""
    status, families = rows.words("status"), rows.jobs.option_column("family")
    reasons = np.full(len(rows), "", dtype=object)
    for finding in reversed(implausible_rows(rows)):
        if finding.rule in REFUSING_RULES:
            reasons[finding.row - 1] = finding.rule
    for reason, is_left_out in (
        ("the label may be cuDNN's search, not the steady state", ~is_usable(rows)),
        (WITH_OTHERS, rows.jobs.column("ranks") > 1),
        ("neither finished nor out of memory", ~np.isin(status, ("ok", "oom"))),
        ("real models, which are for testing only", rows.words("recipe") == ZOO),
    ):
        reasons[is_left_out] = reason
    pairs = zip(families.tolist(), reasons.tolist(), strict=True)
    counts = Counter(f"{family}: {reason}" for family, reason in pairs if reason)
    return rows.take(reasons == ""), counts


def is_held_out_key(architecture_key: str) -> bool:
    """Whether an architecture is held out, for judging only."""
    digest = hashlib.sha256(f"held-out/1 {architecture_key}".encode()).digest()
    return int.from_bytes(digest[:8]) < HELD_OUT_SHARE * 2**64


def newest_after(times: Array, learned_until: float | None) -> float | None:
    """The time after which observations are for judging: the newest share, and none that the
    champion was trained on.

    ``None`` where no row has a time: then all of them may be trained on.
    """
    if not len(times):
        return None
    boundary = float(np.sort(times)[max(0, round(len(times) * (1.0 - NEWEST_SHARE)) - 1)])
    return boundary if learned_until is None else max(boundary, learned_until)
