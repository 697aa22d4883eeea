"""Recorded histories: their file, the snapshot, and the comparison with what really happened."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.allocator import AllocatorSettings, parse_settings
from gpumemnet.errors import DatasetError
from tests.gpumemnet.allocator.reference import (
    FREE,
    USED,
    Piece,
    Range,
    ReferenceAllocator,
    ReferenceOutOfMemory,
)
from tests.gpumemnet.allocator.snapshot import (
    HistoryEvent,
    compare,
    read_history,
    snapshot_history,
)
from tests.gpumemnet.allocator.streams import MIB


class Recorder(ReferenceAllocator):
    """The reference allocator on a driver that hands addresses out from above, writing down what
    PyTorch writes down."""

    def __init__(self, settings: AllocatorSettings, capacity: int | None = None) -> None:
        super().__init__(settings, capacity, 2048 * MIB)
        self.history: list[HistoryEvent] = []
        self._next = 0x7F00_0000_0000

    def lowest_address(self, size: int) -> int:
        self._next -= -(-size // (32 * MIB)) * 32 * MIB
        return self._next

    def from_driver(
        self, size: int, needed: int, stream: int, small: bool
    ) -> tuple[Range, Piece] | None:
        before = self._memory()
        found = super().from_driver(size, needed, stream, small)
        for page in sorted(self._memory() - before):
            kind = "segment_map" if self.settings.expandable_segments else "segment_alloc"
            self.history.append(HistoryEvent(kind, *page, stream))
        return found

    def empty_cache(self) -> None:
        before = self._memory()
        super().empty_cache()
        for page in sorted(before - self._memory()):
            self.history.append(
                HistoryEvent(
                    "segment_unmap" if self.settings.expandable_segments else "segment_free",
                    *page,
                    0,
                )
            )

    def malloc(self, requested: int, stream: int = 0) -> tuple[Range, Piece]:
        where, piece = super().malloc(requested, stream)
        self.history.append(HistoryEvent("alloc", where.address_of(piece), requested, stream))
        return where, piece

    def free(self, where: Range, piece: Piece) -> None:
        for action in ("free_requested", "free_completed"):
            self.history.append(
                HistoryEvent(action, where.address_of(piece), piece.requested, where.stream)
            )
        super().free(where, piece)

    def _memory(self) -> set[tuple[int, int]]:
        """Segments, or the pages of expandable ones."""
        if not self.settings.expandable_segments:
            return {(one.address, one.size) for one in self.ranges}
        pages = set()
        for one in self.ranges:
            page, address = self.page(one.small), one.address
            for piece in one.pieces:
                if piece.state in (USED, FREE):
                    pages |= {
                        (one.address + start * page, page)
                        for start in _pages(address - one.address, piece.size, page)
                    }
                address += piece.size
        return pages


def _pages(begin: int, size: int, page: int) -> range:
    return range(begin // page, -(-(begin + size) // page))


def recorded_job(
    settings: AllocatorSettings, capacity: int | None = None, streams: int = 2
) -> list[HistoryEvent]:
    generator = random.Random(0)
    gpu = Recorder(settings, capacity)
    live: list[Any] = []
    for step in range(800):
        wanted = 40 if step // 100 % 2 else 10
        if live and generator.random() * 2 * wanted < len(live):
            gpu.free(*live.pop(generator.randrange(len(live))))
        else:
            try:
                live.append(
                    gpu.malloc(int(2 ** generator.uniform(0, 25)), generator.randrange(streams))
                )
            except ReferenceOutOfMemory:
                gpu.history.append(HistoryEvent("oom", 0, 0, 0))
    gpu.empty_cache()
    return gpu.history


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("", None),
        ("", 200 * MIB),
        (
            "max_split_size_mb:20",
            None,
        ),  # with a capacity, a history does not tell a release of oversize blocks from one of all
        ("roundup_power2_divisions:4", 200 * MIB),
        ("expandable_segments:True", None),
        ("expandable_segments:True", 150 * MIB),
    ],
)
def test_the_simulator_follows_a_recorded_job_address_by_address(
    text: str, capacity: int | None
) -> None:
    settings = parse_settings(text)
    history = recorded_job(settings, capacity)
    found = compare(history, settings)
    assert (found.first_difference, found.different_addresses, found.unknown_frees) == (None, 0, 0)
    assert found.reserved_bytes == found.recorded_reserved_bytes > 0
    assert (
        found.peak_reserved_bytes
        == found.recorded_peak_reserved_bytes
        >= found.peak_allocated_bytes
        > 0
    )


def write(path: Path, document: object) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump(document, file)
    return path


def test_the_builders_file(tmp_path: Path) -> None:
    history = recorded_job(parse_settings(""))
    events = [[*event, 1_700_000_000_000_000 + index] for index, event in enumerate(history)]
    path = write(
        tmp_path / "history.json.gz", {"version": 1, "phases": [["context", 1]], "events": events}
    )
    assert list(read_history(path)) == history


def test_a_snapshot() -> None:
    history = recorded_job(parse_settings(""))
    trace = [
        {
            "action": one.action,
            "addr": one.address,
            "size": one.size_bytes,
            "stream": one.stream,
            "frames": [],
        }
        for one in history
    ]
    trace.append({"action": "oom", "device_free": 1, "size": 2, "stream": 0})
    assert (
        list(snapshot_history({"segments": [], "device_traces": [[], trace]}, device=1))[:-1]
        == history
    )
    wrong_snapshots: list[dict[str, Any]] = [
        {},
        {"device_traces": [[]]},
        {"device_traces": [[], [{"addr": 1}]]},
    ]
    for wrong in wrong_snapshots:
        with pytest.raises(DatasetError, match="no history of device 1"):
            snapshot_history(wrong, device=1)


TRAINING = """
import json, sys, torch
torch.cuda.init()
torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 128, 3, stride=2), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(8192, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10),
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    images = torch.randn(16 + 8 * step, 3, 96, 96, device="cuda")
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
statistics = torch.cuda.memory_stats()
snapshot = torch.cuda.memory._snapshot()
keys = ("action", "addr", "size", "stream")
json.dump({
    "trace": [{key: event[key] for key in keys if key in event} for event in snapshot["device_traces"][0]],
    "reserved": statistics["reserved_bytes.all.current"],
    "peak_reserved": statistics["reserved_bytes.all.peak"],
    "peak_allocated": statistics["allocated_bytes.all.peak"],
}, sys.stdout)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text", ["", "expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:64"]
)
def test_the_simulator_does_what_a_gpu_does(text: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    command = [sys.executable, "-c", TRAINING]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": text}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    report = json.loads(done.stdout)
    found = compare(snapshot_history({"device_traces": [report["trace"]]}), parse_settings(text))
    assert (found.first_difference, found.unknown_frees) == (None, 0)
    assert found.reserved_bytes == report["reserved"]
    assert found.peak_reserved_bytes == report["peak_reserved"]
    assert found.peak_allocated_bytes == report["peak_allocated"]
