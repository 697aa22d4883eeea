"""The campaign's folder: its plan, and the journal to which every finished measurement is appended
at once.

``kill -9`` at any moment loses no finished row: each is one line of JSON, flushed to the disk
before the next job counts as finished.  When the campaign resumes, an incomplete last line is cut
off, and its job is measured again.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import locked, no_room, replace_file
from gpumemnet.errors import DatasetError, InvalidJobError
from gpumemnet.job.measurement import Measurement, measurement_from_dict, measurement_to_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.sandbox.process import in_processes

from ..planned_job import PlannedJob, parse_planned, training_job

_JOURNAL: Final = "journal.jsonl"
_PLAN: Final = "plan.json"
_WORTH_PROCESSES: Final = 32
"""Jobs above which processes of their own, which first import torch, save time."""


@dataclass(frozen=True)
class Settings:
    """Settings that identify a campaign; two runs with equal settings are one campaign."""

    recipe: str
    recipe_digest: str
    seed: int
    jobs: int


class Journal(ExitStack):
    """The open, locked journal of a campaign's folder; a context manager.

    Attributes:
        folder: the campaign's folder.
        finished: keys of the jobs that have been measured.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the journal, and cut off an incomplete last line.

        Raises:
            DatasetError: when another campaign holds the folder, it cannot be written, or a row in
                it is damaged.
        """
        super().__init__()
        self.folder, path = folder, folder / _JOURNAL
        with ExitStack() as opening:
            with no_room(folder):
                folder.mkdir(parents=True, exist_ok=True)
                busy = (
                    f"another campaign is running in {folder}: wait for it, or give another folder"
                )
                opening.enter_context(locked(path, 0.0, DatasetError(busy)))
                self._file = opening.enter_context(path.open("ab", buffering=0))
                self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
            self.finished = {key for key, _ in _entries(path)}
            self.push(opening.pop_all())

    def append(self, key: str, measurement: Measurement) -> None:
        """Make one measurement durable.

        Raises:
            DatasetError: when the disk is full or the folder is gone; the rows before are kept.
        """
        line = (
            json.dumps({"key": key, "row": measurement_to_dict(measurement)}, separators=(",", ":"))
            + "\n"
        )
        data = line.encode()
        with no_room(self.folder):
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        self.finished.add(key)

    def plan(self, settings: Settings) -> list[PlannedJob] | None:
        """The jobs planned when the campaign began, or ``None`` when it begins now.

        Raises:
            DatasetError: when the folder holds a campaign with other settings.
        """
        try:
            document = json.loads((self.folder / _PLAN).read_bytes())
        except FileNotFoundError:
            return None
        if document["settings"] != asdict(settings):
            held = document["settings"]
            raise DatasetError(
                f"{self.folder} holds another campaign (recipe {held['recipe']}, seed {held['seed']}, {held['jobs']} jobs): "
                "repeat its settings to continue it, or give another folder"
            )
        return [parse_planned(each) for each in document["planned"]]

    def keep_plan(self, settings: Settings, planned: list[PlannedJob]) -> None:
        """Write the plan, once, atomically.

        Raises:
            DatasetError: when it cannot be written.
        """
        document = {"settings": asdict(settings), "planned": [each.to_dict() for each in planned]}
        with no_room(self.folder):
            replace_file(self.folder / _PLAN, json.dumps(document, separators=(",", ":")).encode())


def read_journal(folder: Path) -> Iterator[Measurement]:
    """The finished measurements of a campaign, running or not, in the order in which they finished.

    The layers of their jobs are extracted here, in several processes: a campaign that reads NVML
    every 20 ms has no time for it.

    Raises:
        DatasetError: when there is no journal, or a row of it is damaged.
    """
    path = folder / _JOURNAL
    if not path.is_file():
        raise DatasetError(f"{folder} holds no campaign: it has no {_JOURNAL}")
    rows: list[Measurement] = []
    for line, (_, row) in enumerate(_entries(path), start=1):
        try:
            rows.append(measurement_from_dict(row))
        except (DatasetError, InvalidJobError) as error:
            raise DatasetError(f"{path}, line {line}: {error}") from None
    bare = [(one,) for one in rows if not one.job.has_layers]
    many = len(bare) > _WORTH_PROCESSES
    jobs = iter(in_processes(_extract, bare, None) if many else itertools.starmap(_extract, bare))
    for one in rows:
        yield one if one.job.has_layers else replace(one, job=next(jobs), architecture_key="")


def _extract(row: Measurement) -> TrainingJob:
    """The job of a row, with its layers."""
    assert row.architecture is not None
    assert row.options is not None
    architecture, options = json.loads(row.architecture), json.loads(row.options)
    document = {"family": row.job.family, "architecture": architecture, "options": options}
    return training_job(parse_planned(document))


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Key and row of every complete line; an incomplete last line is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                document = json.loads(line)
                yield document["key"], document["row"]
            except (ValueError, KeyError, TypeError):
                raise DatasetError(
                    f"{path}, line {number} is damaged: remove the line and run again"
                ) from None
