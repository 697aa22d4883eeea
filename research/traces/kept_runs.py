"""Traced runs on disk, so that a change of the trace's rules needs no new trace: one compressed
JSON file for each job.

A run is traced once, at a prime batch size (:mod:`research.traces.batch_scaling`).  The file
holds its events, its storages and the layouts of its operators' arguments; scratch memory is
computed from them again whenever the run is replayed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import DatasetError
from gpumemnet.tracing.timeline import Phase, Storage, Timeline

from .batch_scaling import OperatorCall, ScalableRun, TensorLayout

FORMAT: Final = 2
"""Version of the files; files of another version are traced again."""
_LAYOUT, _DTYPE = "layout", "dtype"


def run_to_dict(run: ScalableRun) -> dict[str, Any]:
    """A JSON-ready object; each text, layout and call is written once."""
    timeline, table = run.timeline, _Table()
    storages = [
        [
            s.size_bytes,
            s.bound_bytes,
            *map(table.number, (s.memory_class, s.operator, s.module)),
            int(s.is_scratch),
            s.stream,
        ]
        for s in timeline.storages
    ]
    calls = [
        [
            *(call.start, call.end, table.number(call.operator)),
            [table.number(_plain(value)) for value in call.args],
            {name: table.number(_plain(value)) for name, value in call.kwargs.items()},
            [table.number(_plain(layout)) for layout in call.outputs],
        ]
        for call in run.calls
    ]
    return {
        "batch_size": run.batch_size,
        "storages": storages,
        "events": timeline.events,
        "phases": [[phase.name, phase.step, phase.start] for phase in timeline.phases],
        "step_starts": timeline.step_starts,
        "calls": calls,
        "values": table.values,
    }


def run_from_dict(document: Mapping[str, Any]) -> ScalableRun:
    """The inverse of :func:`run_to_dict`."""
    values = [_value(each) for each in document["values"]]
    storages = tuple(
        Storage(
            size,
            bound,
            values[memory_class],
            values[operator],
            values[module],
            "kept" if is_scratch else "",
            stream,
        )
        for size, bound, memory_class, operator, module, is_scratch, stream in document["storages"]
    )
    calls = tuple(
        OperatorCall(
            *(start, end, values[operator], tuple(values[number] for number in args)),
            *(
                {name: values[number] for name, number in kwargs.items()},
                tuple(values[number] for number in outputs),
            ),
        )
        for start, end, operator, args, kwargs, outputs in document["calls"]
    )
    phases = tuple(Phase(*phase) for phase in document["phases"])
    timeline = Timeline(storages, tuple(document["events"]), phases, tuple(document["step_starts"]))
    return ScalableRun(timeline, calls, document["batch_size"])


class _Table:
    """Numbers values by their first occurrence."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        key = json.dumps(value, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def _plain(value: Any) -> Any:
    """``value`` as JSON; what no rule for scratch memory reads (devices, memory formats) becomes
    ``None``."""
    if isinstance(value, TensorLayout):
        return {_LAYOUT: [value.shape, value.strides, _name(value.dtype)]}
    if isinstance(value, torch.dtype):
        return {_DTYPE: _name(value)}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, bool | int | float | str) else None


def _value(document: Any) -> Any:
    if isinstance(document, dict):
        if _DTYPE in document:
            return getattr(torch, document[_DTYPE])
        shape, strides, dtype = document[_LAYOUT]
        return TensorLayout(tuple(shape), tuple(strides), getattr(torch, dtype))
    return [_value(entry) for entry in document] if isinstance(document, list) else document


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class KeptRuns:
    """A folder with one file for each traced job; a campaign that stops continues where it was.

    Args:
        folder: made when it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatasetError(f"{folder} cannot be made: {error.strerror}") from None
        self._folder = folder

    def read(self, key: str) -> dict[str, Any] | None:
        """The document of a job; ``None`` when it has not been traced, or by another version of the
        files."""
        try:
            with gzip.open(self._path(key), "rt", encoding="utf-8") as file:
                document: dict[str, Any] = json.load(file)
        except FileNotFoundError:
            return None
        except (OSError, EOFError, ValueError):
            raise DatasetError(
                f"{self._path(key)} is damaged: remove it, and its job is traced again"
            ) from None
        return document if document.get("format") == FORMAT else None

    def keep(self, key: str, document: Mapping[str, Any]) -> None:
        """Write the document of a job, atomically."""
        text = json.dumps({"format": FORMAT, **document}, separators=(",", ":"))
        self._write(self._path(key), gzip.compress(text.encode(), compresslevel=5))

    def read_parts(self, key: str, version: str) -> dict[str, dict[str, int]]:
        """What :meth:`keep_parts` kept for this ``version`` of the trace; empty where there is
        nothing."""
        try:
            document = json.loads(self._parts_path(key).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            raise DatasetError(
                f"{self._parts_path(key)} is damaged: remove it, and its parts are computed again"
            ) from None
        parts: dict[str, dict[str, int]] = (
            document["parts"] if document["version"] == version else {}
        )
        return parts

    def keep_parts(self, key: str, version: str, parts: Mapping[str, Mapping[str, int]]) -> None:
        """Write what was computed from a job's run by this ``version`` of the trace, atomically."""
        self._write(
            self._parts_path(key), json.dumps({"version": version, "parts": parts}).encode()
        )

    def _write(self, path: Path, content: bytes) -> None:
        try:
            replace_file(path, content)
        except OSError as error:
            raise DatasetError(f"{path} cannot be written: {error.strerror}") from None

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json.gz"

    def _parts_path(self, key: str) -> Path:
        return self._folder / f"{key}.parts.json"
