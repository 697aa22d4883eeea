"""The kept answers of the scoreboard: one compact file, by set, estimator and row, so that a run continues where one stopped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.data.atomic_files import replace_file
from gpumemnet.errors import DatasetError

VERSION: Final = 1
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


class Answers:
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
                self._sets = document["sets"]

    def of(self, name: str, sha256: str, estimator: str) -> dict[int, Answer]:
        """Row → answer of ``estimator`` on the set ``name``; none if the dataset has changed since."""
        kept = self._sets.get(name, {})
        if kept.get("sha256") != sha256:
            return {}
        return {
            int(row): Answer(
                None if size is None else size * _UNIT, seconds, None if bound is None else bound * _UNIT, reason or ""
            )
            for row, (size, seconds, bound, reason) in kept["estimators"].get(estimator, {}).items()
        }

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

    def forget(self, estimators: Iterable[str]) -> None:
        """Drop the answers of ``estimators`` on all sets."""
        wanted = set(estimators)
        for kept in self._sets.values():
            kept["estimators"] = {name: rows for name, rows in kept["estimators"].items() if name not in wanted}

    def write(self) -> None:
        """Write the file, whole or not at all; the same answers give the same bytes."""
        document = {"version": VERSION, "sets": self._sets}
        text = json.dumps(document, separators=(",", ":"), sort_keys=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, gzip.compress(text.encode(), mtime=0))
