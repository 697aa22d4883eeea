"""Does the spread of reserved bytes over small, plausible changes of a run tell more than one
replay?

``python benchmarks/replay_spread.py RUNS [--every 9] [--out FILE.jsonl]`` replays published runs of
timm models, as ``python -m research import-real-runs`` has kept them in the folder RUNS: every ninth
model at all its batch sizes, eight times with other workspaces (each convolution's none, half,
once, twice), eight times with one free in twenty one to three events later, and eight times with
both.  It compares the median with the one replay as an expectation, and margins on the spread with
the margin of the trace, on architecture families that set no margin.  With ``--out`` a second run
continues.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real_runs import (  # noqa: E402
    COVERAGE,
    DATASETS,
    FILES,
    FOLDS,
    RESERVED_SHARE,
    WORKSPACE,
    fold_of,
)

from gpumemnet.allocator import EMPTY_CACHE, AllocatorSettings, OutOfMemory, replay  # noqa: E402
from gpumemnet.gpu import available_mib  # noqa: E402
from gpumemnet.job.dataset import read_dataset  # noqa: E402
from gpumemnet.job.measurement import Measurement  # noqa: E402
from gpumemnet.tracing.operators.rules import Platform  # noqa: E402
from gpumemnet.tracing.timeline import (  # noqa: E402
    CONVOLUTION_WORKSPACE,
    Timeline,
    non_allocator_memory,
    repeated,
)
from gpumemnet.units import MIB  # noqa: E402
from research.published_tables import timm_models  # noqa: E402
from research.published_tables.real_runs import RealModel  # noqa: E402
from research.traces.kept_runs import KeptRuns, run_from_dict, with_prefetching  # noqa: E402

REPLAYS: Final = 8
FACTORS: Final = (0, 0.5, 1, 1, 2)
"""Workspaces of a convolution, by the expected ones; drawn for each convolution and operation."""
LATE_SHARE: Final = 0.05
LATE_EVENTS: Final = 3
CHANGES: Final = ("workspaces", "frees", "both")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="folder of the kept runs")
    parser.add_argument("--every", type=int, default=9, help="take one model of so many")
    parser.add_argument("--out", type=Path, help="file that keeps the replays")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    readings = {
        (json.loads(row.architecture)["model"], row.job.batch_size): row
        for row in read_dataset(DATASETS / FILES[0])
        if row.label_state == "steady"
    }
    lines = (
        arguments.out.read_text().splitlines() if arguments.out and arguments.out.exists() else []
    )
    found = {(each["model"], each["batch_size"]): each for each in map(json.loads, lines)}
    models = sorted({model for model, _ in readings})[:: arguments.every]
    runs = KeptRuns(arguments.runs)
    for name in models:
        left = [key for key in readings if key[0] == name and key not in found]
        document = (runs.read(name) or {}) if left else {}
        if "run" in document:
            for result in replays(
                timm_models.real_model(name), document["run"], [size for _, size in left]
            ):
                found[name, result["batch_size"]] = result
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")
    results = [each for key, each in sorted(found.items()) if key[0] in models]
    print_tables(results, [readings[each["model"], each["batch_size"]] for each in results])


def replays(
    model: RealModel, run: dict[str, Any], batch_sizes: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield reserved bytes at each batch size: of the run as it is (``once``), and of its changed
    replays."""
    kept, platform = run_from_dict(run), model.platform(model.gpu)
    for batch_size in batch_sizes:
        timeline, _ = kept.at(batch_size, platform)
        long_run = repeated(with_prefetching(timeline) if model.prefetches else timeline)
        sizes = long_run.sizes
        result: dict[str, Any] = {
            "model": model.key,
            "batch_size": batch_size,
            **{change: [] for change in CHANGES},
        }
        result["once"] = reserved(long_run, sizes, long_run.events, platform)
        for seed in range(REPLAYS):
            draw = random.Random(seed)
            other_sizes = with_other_workspaces(long_run, draw)
            other_events = with_late_frees(long_run, draw)
            result["workspaces"].append(reserved(long_run, other_sizes, long_run.events, platform))
            result["frees"].append(reserved(long_run, sizes, other_events, platform))
            result["both"].append(reserved(long_run, other_sizes, other_events, platform))
        yield result


def reserved(
    timeline: Timeline, sizes: list[int], events: tuple[int, ...], platform: Platform
) -> int:
    """Return the reserved bytes in steady state, within the card if that suffices."""
    capacity = (
        available_mib(platform.device) * MIB
        - non_allocator_memory(platform.device, timeline.groups).expected_bytes
    )
    for limit in (capacity, None):
        try:
            return replay(
                events,
                sizes,
                AllocatorSettings(),
                limit,
                streams=timeline.streams,
                shrinkable=timeline.shrinkable,
                steady_from=timeline.steady_from,
            ).peak_reserved_bytes
        except OutOfMemory:
            continue
    raise AssertionError("without a limit every run fits")


def with_other_workspaces(timeline: Timeline, draw: random.Random) -> list[int]:
    """Sizes with other workspaces of convolutions; a convolution has the same in every step."""
    factors: dict[tuple[str, str, int], float] = {}
    sizes = timeline.sizes
    for index, storage in enumerate(timeline.storages):
        if storage.scratch == CONVOLUTION_WORKSPACE:
            key = (storage.operator, storage.module, storage.size_bytes)
            if key not in factors:
                factors[key] = draw.choice(FACTORS)
            sizes[index] = int(sizes[index] * factors[key])
    return sizes


def with_late_frees(timeline: Timeline, draw: random.Random) -> tuple[int, ...]:
    """Events in which some frees come up to :data:`LATE_EVENTS` later."""
    events: list[int] = []
    late: list[tuple[int, int]] = []
    for index, event in enumerate(timeline.events):
        events += [free for due, free in late if due <= index]
        late = [each for each in late if each[0] > index]
        if event < 0 and event != EMPTY_CACHE and draw.random() < LATE_SHARE:
            late.append((index + draw.randint(1, LATE_EVENTS), event))
        else:
            events.append(event)
    return (*events, *(free for _, free in late))


def print_tables(results: list[dict[str, Any]], rows: list[Measurement]) -> None:
    """Print how well each expectation and each margin does."""
    labels = np.array([row.label_bytes for row in rows], dtype=float)
    once = np.array([each["once"] for each in results], dtype=float)
    print(
        "| expectation | rows | median error | 90th percentile |", "|---|---:|---:|---:|", sep="\n"
    )
    for name in ("once", *CHANGES):
        values = (
            once
            if name == "once"
            else np.array([np.median([*each[name], each["once"]]) for each in results])
        )
        errors = abs(values + np.median(labels - values) - labels) / labels
        print(
            f"| {name} | {len(rows)} | {np.median(errors):.2%} | {np.quantile(errors, 0.9):.1%} |"
        )
    workspaces = np.array([row.traced[WORKSPACE] for row in rows], dtype=float)
    folds = np.array([fold_of(row.split_group) for row in rows])
    expected = once + np.median(labels - once)
    print(
        "\n| margin on | above the bound | over-allocation, median | 90th percentile |",
        "|---|---:|---:|---:|",
        sep="\n",
    )
    today = RESERVED_SHARE * once + workspaces
    scales = {"the largest workspace, as the trace does": today}
    for name in CHANGES:
        upper = np.array([np.quantile([*each[name], each["once"]], 0.9) for each in results])
        spread = np.maximum(upper - once, 0)
        scales |= {
            f"the spread over {name}": RESERVED_SHARE * once + spread,
            f"both, {name}": today + spread,
        }
    for name, scale in scales.items():
        needed = (labels - expected) / scale
        multiples = np.array(
            [np.quantile(needed[folds != fold], COVERAGE) for fold in range(FOLDS)]
        )
        over = (expected + multiples[folds] * scale) / labels - 1
        print(
            f"| {name} | {np.mean(over < 0):.1%} | {np.median(over):.1%} | {np.quantile(over, 0.9):.1%} |"
        )


if __name__ == "__main__":
    main()
