"""The kept answers of the scoreboard: one compact file, by set, estimator and row, so that a run
continues where one stopped.

Answers belong to the dataset whose checksum stands beside them.  Whoever changes an estimator asks
it again (``--renew``).
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import DatasetError, GpumemnetError, InvalidRequestError
from research.estimators.estimator import NotCoveredError, PublishedEstimator, Subject

VERSION: Final = 2
_UNIT: Final = 1024
"""Bytes are kept in KiB: readings are in MiB."""
_SECONDS_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What an estimator answered for one row.

    Attributes:
        total_bytes: the estimate; ``None`` where it has no answer.
        seconds: it took.
        bound_bytes: its own upper bound, where it gives one.
        reason: why there is no answer.
    """

    total_bytes: int | None
    seconds: float
    bound_bytes: int | None = None
    reason: str = ""


def asked(estimator: PublishedEstimator, subject: Subject) -> Answer:
    """What ``estimator`` answers for ``subject``; a fault of the model's code is no answer."""
    start = time.perf_counter()
    try:
        estimate = estimator.estimate(subject)
    except (NotCoveredError, GpumemnetError) as error:
        if isinstance(error, DatasetError):
            raise
        return Answer(None, time.perf_counter() - start, reason=str(error)[:160])
    return Answer(estimate.total_bytes, estimate.seconds)


class KeptAnswers:
    """All answers, kept in a gzipped JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sets: dict[str, dict[str, Any]] = {}
        if path.is_file():
            try:
                document = json.loads(gzip.decompress(path.read_bytes()))
            except (OSError, ValueError, EOFError) as error:
                raise DatasetError(f"{path} holds no kept answers ({error}): delete it") from None
            if document.get("version") == VERSION:
                self._sets = {
                    name: {"sha256": kept["sha256"], "estimators": kept["estimators"]}
                    for name, kept in document["sets"].items()
                }

    def of(self, name: str, sha256: str, estimator: str) -> dict[int, Answer]:
        """Row → answer of ``estimator`` on the set ``name``; none if the dataset has changed
        since."""
        kept = self._sets.get(name, {})
        if kept.get("sha256") != sha256:
            return {}
        return {
            int(row): Answer(
                None if size is None else size * _UNIT,
                seconds,
                None if bound is None else bound * _UNIT,
                reason or "",
            )
            for row, (size, seconds, bound, reason) in kept["estimators"].get(estimator, {}).items()
        }

    def forget(self, estimator: str) -> None:
        """Drop the answers of ``estimator`` on all sets, so that it is asked again.

        Raises:
            InvalidRequestError: no answer of such an estimator is kept.
        """
        sets = [kept["estimators"] for kept in self._sets.values()]
        if not any(estimator in kept for kept in sets):
            names = sorted({name for kept in sets for name in kept})
            raise InvalidRequestError(
                f"no answers of '{estimator}' are kept, only of {', '.join(names)}", "renew"
            )
        for kept in sets:
            kept.pop(estimator, None)

    def keep(self, name: str, sha256: str, estimator: str, answers: Mapping[int, Answer]) -> None:
        """Add answers; those of a dataset that has changed are dropped first."""
        if self._sets.get(name, {}).get("sha256") != sha256:
            self._sets[name] = {"sha256": sha256, "estimators": {}}
        kept = self._sets[name]["estimators"].setdefault(estimator, {})
        for row, answer in answers.items():
            kept[str(row)] = (
                None if answer.total_bytes is None else round(answer.total_bytes / _UNIT),
                round(answer.seconds, _SECONDS_DIGITS),
                None if answer.bound_bytes is None else round(answer.bound_bytes / _UNIT),
                answer.reason or None,
            )

    def write(self) -> None:
        """Write the file, whole or not at all; the same answers give the same bytes."""
        document = {"version": VERSION, "sets": self._sets}
        text = json.dumps(document, separators=(",", ":"), sort_keys=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, gzip.compress(text.encode(), mtime=0))
