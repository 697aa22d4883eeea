"""Traces of real runs that are kept in a folder, with the loader of timm and the parts of a peak."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import DatasetError
from gpumemnet.gpu import DeviceProfile
from gpumemnet.tracing.timeline import Phase, Storage, Timeline, steady_memory
from research.traces.batch_scaling import OperatorCall, ScalableRun, TensorLayout

_STREAM: Final = 1
"""The loader's stream; 0 is the default one."""
_FLOAT_BYTES: Final = 4
_INPUT: Final = "input"


def with_prefetching(timeline: Timeline) -> Timeline:
    """Return ``timeline`` with each batch loaded by a loader that prefetches.

    Args:
        timeline: a run that copies one batch to the GPU in each step: images in fp32 and their
            labels.
    """
    old, loader = timeline, _Loader(_batch_of(timeline))
    names: dict[int, int] = {}
    phases, step_starts = list(old.phases), list(old.step_starts)
    new_phases, new_starts = [], []
    for index in range(len(old.events) + 1):
        while phases and phases[0].start == index:
            new_phases.append(Phase(phases[0].name, phases[0].step, len(loader.events)))
            phases.pop(0)
        while step_starts and step_starts[0] == index:
            new_starts.append(len(loader.events))
            step_starts.pop(0)
            if step_starts:  # the last entry is the end of the last step
                loader.next_batch()
        if index == len(old.events):
            break
        event = old.events[index]
        if event == EMPTY_CACHE:
            loader.events.append(event)
        elif old.storages[max(event, ~event)].memory_class != _INPUT:
            if event >= 0:
                names[event] = loader.allocate(old.storages[event])
            else:
                loader.events.append(~names[~event])
    storages, events = tuple(loader.storages), tuple(loader.events)
    return replace(
        old,
        storages=storages,
        events=events,
        phases=tuple(new_phases),
        step_starts=tuple(new_starts),
    )


def _batch_of(timeline: Timeline) -> list[Storage]:
    """The storages of one batch, on the loader's stream."""
    first_step = timeline.events[timeline.step_starts[0] : timeline.step_starts[1]]
    arrived = [timeline.storages[event] for event in first_step if event >= 0]
    return [
        replace(storage, stream=_STREAM) for storage in arrived if storage.memory_class == _INPUT
    ]


class _Loader:
    """Storages and events of a run whose batches are prefetched.

    Args:
        batch: storages of one batch, the largest of which holds the images.
    """

    def __init__(self, batch: list[Storage]) -> None:
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self._batch = batch
        images = max(storage.size_bytes for storage in batch)
        self._image_bytes = replace(
            batch[0], size_bytes=images // _FLOAT_BYTES, bound_bytes=images // _FLOAT_BYTES
        )
        self._held: list[list[int]] = []

    def allocate(self, storage: Storage) -> int:
        """Allocate ``storage`` and return its number."""
        self.events.append(len(self.storages))
        self.storages.append(storage)
        return self.events[-1]

    def next_batch(self) -> None:
        """Load the next batch, and before the first step the first one too; then release the batch
        of the step before."""
        is_first = not self._held
        for _ in range(2 if is_first else 1):
            image_bytes = self.allocate(self._image_bytes)
            self._held.append([self.allocate(storage) for storage in self._batch])
            self.events.append(~image_bytes)
        if not is_first:
            self.events += [~number for number in self._held.pop(0)]


def traced_parts(
    timeline: Timeline, largest: Mapping[str, int], device: DeviceProfile
) -> dict[str, int]:
    """The parts of ``timeline`` on ``device``, in bytes, without the CUDA context.

    Args:
        timeline: the run at one batch size.
        largest: the largest piece of scratch memory of each kind, as
            :meth:`~research.traces.batch_scaling.ScalableRun.at` returns it.
        device: the GPU.
    """
    memory = steady_memory(timeline, device).replayed
    return {
        "steady_reserved_bytes": memory.reserved_bytes,
        "startup_peak_reserved_bytes": memory.startup_peak_reserved_bytes,
        "steady_allocated_bytes": memory.allocated_bytes,
        "largest_convolution_workspace_bytes": largest.get("convolution", 0),
        "largest_convolution_search_bytes": largest.get("convolution_benchmark", 0),
    }


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
