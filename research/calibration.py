"""Calibrates the safe bytes of traces: the margin of each kind of run, and what share of published
readings lies below, with margins that no row of the same model family has set.

Rows come from runs of timm on an A100 and of xMem on GeForce cards (datasets with traced parts), and
from the fine-tuning jobs that ``fit --exact`` traced.  What a reading of the datasets holds beside
the traced bytes is one constant for each GPU, from other families.  timm's ladders on an RTX 3090
set no margin: they say whether the safe bytes deny the batch that did not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import gpumemnet
from gpumemnet.atomic_files import replace_file
from gpumemnet.gpu import device_profile
from gpumemnet.job.dataset import read_dataset
from gpumemnet.predict.conformal import conformal_quantiles
from gpumemnet.tracing.timeline import CONVOLUTIONS, FROZEN, OTHERS, RANKS, safety
from research.batch_ladders import GPU, TOO_LOW, Ladder
from research.readings import ADAPTERS, QUANTISED, SEVERAL_RANKS, Reading, factors_without

COVERAGE: Final = 0.99
DATASETS: Final = Path(__file__).parents[1] / "dataset_builder" / "datasets" / "real_runs"
_FILES: Final = ("published_timm_a100.parquet", "published_xmem_rtx30_40.parquet")
_WORKSPACE: Final = "largest_convolution_workspace_bytes"
_SEARCH, _PLAIN = "convolutions, cuDNN's search", "fp32, no convolution workspaces"
WORST: Final = 40
_ALL, _MAKER = "all", "NVIDIA "


class Run(NamedTuple):
    """A published run, and what a trace says.

    Attributes:
        name, gpu, family: of the run; whole families are held out.
        kind: which margin it has; empty where ``fit`` has a factor of its own, or nothing is said of
            the causes: such a run sets no margin.
        causes: what its memory depends on.
        read_bytes, expected_bytes: of the same quantity.
        reserved_bytes: the part of the expectation that the margin is a share of.
        workspace_bytes: its largest convolution workspace.
    """

    name: str
    gpu: str
    family: str
    kind: str
    causes: Sequence[str]
    read_bytes: float
    expected_bytes: float
    reserved_bytes: float
    workspace_bytes: float = 0.0

    @property
    def needed(self) -> float:
        """The margin at which the reading is the bound."""
        return (self.read_bytes - self.bound_bytes(0.0)) / self.reserved_bytes

    @property
    def error(self) -> float:
        """How far the expectation lies above the reading, relative to it."""
        return self.expected_bytes / self.read_bytes - 1.0

    def bound_bytes(self, margin: float) -> float:
        """The safe bytes, without what scratch memory and the context add at their bounds."""
        workspaces = safety()["workspaces"] * self.workspace_bytes
        return float(self.expected_bytes + margin * self.reserved_bytes + workspaces)


def runs(found: Iterable[Reading]) -> list[Run]:
    """The traced readings and the runs of the datasets."""
    return [*map(_of_reading, found), *(run for name in _FILES for run in _of_dataset(name))]


def _of_reading(each: Reading) -> Run:
    kinds = {SEVERAL_RANKS: RANKS, QUANTISED: "", ADAPTERS: FROZEN}
    known = (kinds[cause] for cause in kinds if cause in each.causes)
    kind = next(known, OTHERS if each.causes else "")
    reserved = each.expected_bytes - each.context_bytes
    gpu = device_profile(each.gpu).name
    return Run(
        each.row,
        gpu,
        each.family.removeprefix("vis:"),
        kind,
        each.causes,
        each.read_bytes,
        each.expected_bytes,
        reserved,
    )


def _of_dataset(name: str) -> Iterator[Run]:
    rows = [
        row
        for row in read_dataset(DATASETS / name)
        if row.label_bytes is not None and row.traced and row.label_state == "steady"
    ]
    gpus, families, labels = (
        np.array(each)
        for each in zip(*((row.gpu, row.split_group, row.label_bytes) for row in rows), strict=True)
    )
    traced = [dict(row.traced or {}) for row in rows]
    reserved = np.array([each["steady_reserved_bytes"] for each in traced], dtype=float)
    outside = {
        key: float(np.median((labels - reserved)[(gpus == key[0]) & (families != key[1])]))
        for key in set(zip(gpus.tolist(), families.tolist(), strict=True))
    }
    for index, row in enumerate(rows):
        workspace = float(traced[index][_WORKSPACE])
        yield Run(
            f"{json.loads(row.architecture)['model']}, batch {row.job.batch_size}",
            row.gpu,
            row.split_group,
            CONVOLUTIONS if workspace else OTHERS,
            [_SEARCH if workspace else _PLAIN],
            float(labels[index]),
            reserved[index] + outside[row.gpu, row.split_group],
            reserved[index],
            workspace,
        )


def margins(every: Sequence[Run]) -> dict[str, float]:
    """The margin of each kind, below which :data:`COVERAGE` of its readings lie; where there are too
    few, the largest that one of them, or another kind, needs."""
    needed = {
        kind: np.array([run.needed for run in every if run.kind == kind])
        for kind in (CONVOLUTIONS, FROZEN, OTHERS, RANKS)
    }
    found = {kind: conformal_quantiles(own, [COVERAGE])[0] for kind, own in needed.items()}
    widest = max((margin for margin in found.values() if margin), default=0.0)
    return {
        kind: round(float(max([0.0, found[kind] or max([widest, *own])])), 4)
        for kind, own in needed.items()
    }


def held_out(every: Sequence[Run], named: Sequence[Reading] = ()) -> list[tuple[Run, float]]:
    """Each run, and its bound by the margins of other families; the factor of names is from the
    ``named`` answers of other families, or the shipped one where there are none."""
    found = []
    for family in sorted({run.family for run in every}):
        by_name = max(factors_without(named, family)["plain"] - 1.0, 0.0)
        known = {**margins([run for run in every if run.family != family]), "": by_name}
        found += [(run, run.bound_bytes(known[run.kind])) for run in every if run.family == family]
    return found


class Calibration(NamedTuple):
    """What was calibrated, and how it did.

    Attributes:
        document: the file of the margins.
        judged: each run, and its bound by the margins of other families.
        ladders: of which the safe bytes deny the batch that did not run, or allow it.
    """

    document: Mapping[str, Any]
    judged: Sequence[tuple[Run, float]]
    ladders: Sequence[Ladder]


def calibrated(found: Iterable[Reading | Ladder], named: Sequence[Reading] = ()) -> Calibration:
    """The margins from all readings, and the coverage of each card; ``named`` are answers of the
    instant depth, whose factor bases of 4 bits have."""
    answers = list(found)
    every = runs(each for each in answers if isinstance(each, Reading))
    ladders = [each for each in answers if isinstance(each, Ladder)]
    judged = held_out(every, named)
    coverage: dict[str, list[int]] = {}
    for run, bound in judged:
        counts = coverage.setdefault(run.gpu, [0, 0])
        counts[0] += run.read_bytes <= bound
        counts[1] += 1
    if ladders:
        denied = sum(each.safe != TOO_LOW for each in ladders)
        coverage[device_profile(GPU).name] = [denied, len(ladders)]
    document: dict[str, Any] = {
        "margins": margins(every),
        "workspaces": safety()["workspaces"],
        "coverage": dict(sorted(coverage.items())),
    }
    return Calibration(document, judged, ladders)


def write(document: Mapping[str, Any]) -> None:
    """Replace the margins of the installed package."""
    path = Path(gpumemnet.__file__).parent / "tracing" / "safety.json"
    replace_file(path, (json.dumps(document, indent=1) + "\n").encode())


def table(made: Calibration) -> list[str]:
    """Lines of Markdown: coverage by cause and by card; a run stands in each row that it is in."""
    lines = [
        "| what the memory depends on | rows | families | above safe | safe over read, median | 90th |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    keys = [_ALL, *sorted({cause for run, _ in made.judged for cause in run.causes})]
    keys += sorted({run.gpu for run, _ in made.judged})
    for key in keys:
        own = [pair for pair in made.judged if key in (_ALL, *pair[0].causes, pair[0].gpu)]
        over = np.array([bound / run.read_bytes - 1.0 for run, bound in own])
        families = len({run.family for run, _ in own})
        cells = f"{np.mean(over < 0):.1%} | {np.median(over):+.1%} | {np.quantile(over, 0.9):+.1%}"
        lines.append(f"| {key.removeprefix(_MAKER)} | {len(own):,} | {families} | {cells} |")
    if made.ladders:
        low = np.mean([each.safe == TOO_LOW for each in made.ladders])
        families = len({each.family for each in made.ladders})
        cells = f"{len(made.ladders):,} | {families} | {low:.1%} | – | –"
        lines.append(f"| {GPU}, ladders of batches | {cells} |")
    return lines


def worst(judged: Sequence[tuple[Run, float]]) -> list[str]:
    """Lines of Markdown: the jobs by name that are furthest from their readings, and why, where it
    is known; ``docs/evaluation/real_runs.md`` has those of the datasets."""
    own = [pair for pair in judged if not {_SEARCH, _PLAIN} & set(pair[0].causes)]
    lines = [
        "| row | what it depends on | read GB | expected GB | error | below safe | cause |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for run, bound in sorted(own, key=lambda pair: -abs(pair[0].error))[:WORST]:
        is_met = abs(run.error) < _MET
        parts = [run.name, *run.causes] if run.error < 0.0 else [run.name]
        known = (text for part, text in _CAUSES.items() if any(part in each for each in parts))
        cause = "–" if is_met else next(known, "not known")
        sizes = f"{run.read_bytes / 1e9:.2f} | {run.expected_bytes / 1e9:.2f} | {run.error:+.1%}"
        is_below = "yes" if run.read_bytes <= bound else "no"
        lines.append(f"| {run.name} | {', '.join(run.causes)} | {sizes} | {is_below} | {cause} |")
    return lines


_MET: Final = 0.01
_CAUSES: Final[Mapping[str, str]] = {
    "adalora": "importance scores, which the script updates, are not traced",
    "fourierft": "the workspace of cuFFT",
    QUANTISED: "older bitsandbytes keeps the input of each quantised layer",
}
"""Part of a row's name, or what a reading above the expectation depends on → why."""
