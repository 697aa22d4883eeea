"""The first page of the scoreboard: readings of fine-tuning, xMem's own runs, and what the safe
bytes cover, each with whoever is ahead of us."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import replace_file
from research.batch_ladders import EXACT, TOO_LOW, Ladder
from research.calibration import Calibration, calibrated, table, worst
from research.readings import (
    FIT,
    SEVERAL_RANKS,
    Reading,
    figures,
    instant,
    kept_answers,
    ratios,
)

from .board import Line, Table
from .pictures import png, strips

READINGS: Final = "readings.jsonl"
"""The kept answers of ``python -m research readings``, beside the page."""
_SAFE: Final = "safe.png"
_XMEM_SET: Final = "xMem's runs, RTX 3060 and 4060"
_SHOWN: Final = (
    "xMem, as published",
    "MemTracker",
    "DNNMem, as published",
    "SchedTune, as published",
    "LLMem",
    "gpumemnet, trace",
    "gpumemnet, classifier (layers)",
)
_OURS: Final = "gpumemnet"
Cells = tuple[str, int, tuple[float, ...]]
"""An estimator, its rows, and its figures; lower is better."""


def write_front(out: Path, shown: Mapping[str, Sequence[Table]], command: str) -> list[str]:
    """Write ``index.md`` and its two pictures into ``out``; returns lines of the appendix.

    Args:
        out: the folder, which holds the kept answers to readings.
        shown: title of a set → its tables.
        command: that makes the page.
    """
    answers = kept_answers(out / READINGS)
    latest = {key.rpartition(" ")[0]: found for key, found in answers.items()}
    traced = {
        found.row: found
        for key, found in latest.items()
        if isinstance(found, Reading) and key.endswith("True")
    }
    ladders = [found for found in latest.values() if isinstance(found, Ladder)]
    made = calibrated([*traced.values(), *ladders], instant(answers))
    alone = {row: each for row, each in traced.items() if SEVERAL_RANKS not in each.causes}
    several = [each for row, each in traced.items() if row not in alone]
    fine_tuning = _fine_tuning(latest, alone)
    lines = [
        "# Scoreboard: who knows a run's memory before it starts",
        "",
        f"`{command}` makes this page from kept answers.",
        "The [appendix](appendix.md) has older sets, where SchedTune, Horus and DeepSpeed are ahead in places,",
        "and the forty worst rows; [how to read it](reading.md).",
        "",
    ]
    if fine_tuning:
        cells = [(name, len(own), figures(own)) for name, own in fine_tuning.items()]
        lines += [
            "## Fine-tuning on one GPU",
            "",
            "fms-acceleration, litgpt and PEFT on A100, A10G and L40S: rows that both of our depths answer.",
            f"All traced rows (median, 90th): {_summary(alone.values())}; by FSDP on several GPUs {_summary(several)}.",
            "",
            *_compared(cells, ("median error", "90th percentile", "more than 10 % too low")),
            *_picture(out, "readings.png", fine_tuning, "estimate over reading; the band is ±10 %"),
        ]
    if _XMEM_SET in shown:
        lines += [
            "## xMem's own runs, RTX 3060 and 4060",
            "",
            "*Failure*: a wrong forecast of whether the run fits, or too small a limit; *with a line*: fitted to runs of other",
            "families; *as a bound*: with a margin for 99 %.",
            "",
            *_compared(
                _of_xmem(shown[_XMEM_SET]),
                ("median error", "90th percentile", "failures", "with a line", "as a bound"),
            ),
        ]
    over = {
        key: np.array([run.read_bytes / bound for run, bound in made.judged if key in run.causes])
        for key in sorted({cause for run, _ in made.judged for cause in run.causes})
    }
    lines += [
        "## What the safe bytes of a trace cover",
        "",
        "Rows judged by margins of other model families.",
        "",
        *table(made),
        "",
        *_ladders(made),
        *_picture(
            out,
            _SAFE,
            over,
            "reading over safe bytes: above 1 a job runs out of memory; at the edges: beyond",
        ),
    ]
    replace_file(out / "index.md", ("\n".join(lines).rstrip() + "\n").encode())
    return ["## The forty worst rows", "", *worst(made.judged), ""]


def _fine_tuning(
    latest: Mapping[str, Any], traced: Mapping[str, Reading]
) -> dict[str, NDArray[np.float64]]:
    """Estimates over readings of each estimator, of the rows that both of our depths answer."""
    instant = {row: latest.get(f"{row} False") for row in traced}
    both = {row: each for row, each in instant.items() if isinstance(each, Reading)}
    if not both:
        return {}
    exact = {f"{FIT} --exact": ratios([traced[row] for row in both])[FIT]}
    return exact | ratios(list(both.values()))


def _summary(found: Iterable[Reading]) -> str:
    every = [*found]
    if not every:
        return "no rows"
    median, most, _ = figures(ratios(every)[FIT])
    return f"{len(every)} at {median:.1%} and {most:.1%}"


def _of_xmem(tables: Sequence[Table]) -> list[Cells]:
    """Of the whole sample; an estimator of language models alone has fewer rows."""
    found: dict[str, tuple[Table, Line]] = {}
    for each in sorted(tables, key=lambda one: one.rows):
        found |= {line.name: (each, line) for line in each.lines if line.name in _SHOWN}
    return [
        (
            name,
            each.rows,
            (
                line.raw.median_error,
                line.raw.p90_error,
                *(each.failures for each in (line.raw, line.with_line, line.bound)),
            ),
        )
        for name, (each, line) in found.items()
    ]


def _compared(rows: Sequence[Cells], figures: Sequence[str]) -> list[str]:
    """A table, who is ahead of us in it, and by how much."""
    ahead = []
    for index, figure in enumerate(figures):
        ours = min(cells[index] for name, _, cells in rows if name.startswith(_OURS))
        better = [(cells[index], name) for name, _, cells in rows if cells[index] < ours]
        if better:
            best, name = min(better)
            ahead.append(f"{name} in *{figure}* ({best:.1%}, ours {ours:.1%})")
    lines = [f"**Ahead of us**: {'; '.join(ahead) or 'nobody'}.", ""]
    lines += [f"| estimator | rows | {' | '.join(figures)} |", f"|---|--:|{'--:|' * len(figures)}"]
    for name, count, cells in sorted(rows, key=lambda row: row[2]):
        title = f"**{name}**" if name.startswith(_OURS) else name
        lines.append(f"| {title} | {count} | {' | '.join(f'{cell:.1%}' for cell in cells)} |")
    return [*lines, ""]


def _ladders(made: Calibration) -> list[str]:
    if not made.ladders:
        return []
    shares = [
        np.mean([getattr(each, name) == kind for each in made.ladders])
        for name, kind in (("expected", EXACT), ("expected", TOO_LOW), ("safe", TOO_LOW))
    ]
    return [
        f"timm says of {len(made.ladders)} ladders on an RTX 3090 which batch ran, and which did not. Expected bytes agree with",
        f"both in {shares[0]:.1%}, and allow the latter in {shares[1]:.1%}; safe bytes in {shares[2]:.1%}.",
        "",
    ]


def _picture(
    out: Path, name: str, groups: Mapping[str, NDArray[np.float64]], words: str
) -> list[str]:
    replace_file(out / name, png(strips(groups, words, is_bound=name == _SAFE)))
    return [f"![{words}]({name})", ""]
