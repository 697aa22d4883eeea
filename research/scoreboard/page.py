"""Writes the scoreboard: its first page, the appendix, the same figures as JSON, and pictures."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from research.estimators import dnnperf
from research.estimators.estimator import PublishedEstimator
from research.estimators.xmem import XMEM

from .board import SAMPLE_TITLE, Line, Table
from .collect import FORMULAS, OF_MODELS
from .front import write_front
from .ours import TRACE
from .protocol import Figures
from .sets import RowSet

_LEARNT: Final = (
    ("SchedTune", "totals", "whatever its features do not say", "Albahar et al., CCGrid 2022"),
    (dnnperf.NAME, dnnperf.NEEDS, dnnperf.LEAVES_OUT, dnnperf.SOURCE),
    (
        "gpumemnet, classifier (layers)",
        "layers",
        "nothing on purpose",
        "gpumemnet, MLP-based classifier",
    ),
    (
        "gpumemnet, classifier (totals)",
        "totals",
        "nothing on purpose",
        "gpumemnet, MLP-based classifier",
    ),
)
_NEED_MODEL: Final = frozenset(
    {*(estimator.name for estimator in OF_MODELS), XMEM.name, TRACE.name}
)
_MOST_FIRSTS: Final = 3
_HEADER: Final = (
    "| estimator | error | 90th | failures | saved | under | over | bin | with a line: error | 90th | failures | "
    "as a bound: failures | saved | under | over | both: failures | seconds |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def write_page(
    out: Path,
    sets: Mapping[str, tuple[RowSet, Sequence[Table]]],
    agreements: Mapping[str, Mapping[str, tuple[int, float]]],
    command: str,
) -> Path:
    """Write the first page, ``appendix.md``, ``results.json`` and pictures into ``out``; returns the
    first page's path.

    Args:
        out: the folder.
        sets: title of a set → its rows and its tables.
        agreements: title of a set → tool → how the simulated test of a limit agrees with repeated
            runs.
        command: that makes the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    shown = {title: _main_table(made) for title, (_, made) in sets.items() if made}
    lines = [
        "# Published estimators on published runs, set by set",
        "",
        *_firsts(shown),
        "",
        f"`{command}` makes this page, the appendix of the [scoreboard](index.md);",
        "[how to read it](reading.md) explains its columns, and how to add an estimator.",
        "",
    ]
    document: dict[str, Any] = {"command": command, "sets": {}}
    for title, (rows, made) in sets.items():
        lines += [f"## {title}", ""]
        document["sets"][rows.recipe.name] = {
            "title": title,
            "sha256": rows.sha256,
            "tables": [asdict(table) for table in made],
        }
        for table in made:
            lines += _table(table)
        if agreed := agreements.get(title):
            words = "; ".join(
                f"{name}: {share:.0%} of {count}" for name, (count, share) in agreed.items()
            )
            lines += textwrap.wrap(
                "How far the simulated test of a limit can be trusted: the share of runs for which it says the same as the "
                f"repeated run on the GPU. Counted are runs that ended well and were forecast to. {words}.",
                118,
            )
            lines += [""]
    lines += [
        "## The estimators",
        "",
        "| estimator | needs | leaves out | after |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join(row)} |" for row in (*_described((*FORMULAS, *OF_MODELS, XMEM)), *_LEARNT)
    ]
    replace_file(
        out / "results.json", (json.dumps(_without_nan(document), indent=1) + "\n").encode()
    )
    lines += ["", *write_front(out, {title: made for title, (_, made) in sets.items()}, command)]
    replace_file(out / "appendix.md", ("\n".join(lines).rstrip() + "\n").encode())
    return out / "index.md"


def _main_table(made: Sequence[Table]) -> Table:
    """The table of the sample; where all of it ran on the CPU, or too few of its rows are answered,
    the first one."""
    return next((table for table in made if table.title == SAMPLE_TITLE), made[0])


_JUDGED: Final[Mapping[str, Callable[[Line], float]]] = {
    "error, as it comes": lambda line: line.raw.median_error,
    "error, with a line": lambda line: line.with_line.median_error,
    "failures, as it comes": lambda line: line.raw.failures,
    "failures, with a line": lambda line: line.with_line.failures,
    "failures, as a bound": lambda line: line.bound.failures,
    "failures, estimate and bound": lambda line: line.both_failures,
}
"""Column of the table of firsts → the figure."""
_NO_MODEL: Final = "error with a line, no model needed"
_WITH_LINE: Final = _JUDGED["error, with a line"]


def _firsts(shown: Mapping[str, Table]) -> list[str]:
    """Who is first in each set, whoever it is."""
    lines = [
        f"| first in | rows | {' | '.join(_JUDGED)} | {_NO_MODEL} |",
        f"|---|--:|{'---|' * (len(_JUDGED) + 1)}",
    ]
    for title, table in shown.items():
        cells = [_first(table.lines, figure) for figure in _JUDGED.values()]
        cells.append(_first(_without_model(table), _WITH_LINE))
        lines.append(f"| {title} | {table.rows:,} | {' | '.join(cells)} |")
    return lines


def _without_model(table: Table) -> list[Line]:
    return [
        line
        for line in table.lines
        if line.name not in _NEED_MODEL and "as published" not in line.name
    ]


def _first(lines: Sequence[Line], figure: Callable[[Line], float]) -> str:
    """The lowest figure and who has it; those within a rounding share the place."""
    known = [line for line in lines if not math.isnan(figure(line))]
    if not known:
        return "–"
    lowest = min(map(figure, known))
    names = [line.name for line in known if _share(figure(line)) == _share(lowest)]
    return (
        f"{', '.join(names)}: {_share(lowest)}"
        if len(names) <= _MOST_FIRSTS
        else f"{len(names)} estimators: {_share(lowest)}"
    )


def _table(table: Table) -> list[str]:
    out_of_memory = f", {table.out_of_memory} of them out of memory" if table.out_of_memory else ""
    lines = [
        f"**{table.title[0].upper()}{table.title[1:]}: {table.rows:,} rows{out_of_memory}**",
        "",
        *_HEADER,
    ]
    lines += [_line(line) for line in table.lines]
    if table.left_out:
        counts: dict[int, list[str]] = {}
        for name, count in table.left_out.items():
            counts.setdefault(count, []).append(name)
        reasons = [
            f"{', '.join(names)} ({count:,} of {table.asked:,} rows)"
            for count, names in sorted(counts.items())
        ]
        lines += ["", *textwrap.wrap(f"*Too few answers: {'; '.join(reasons)}.*", 118)]
    return [*lines, ""]


def _line(line: Line) -> str:
    raw, fitted, bound = line.raw, line.with_line, line.bound
    cells = [
        *(
            _share(value)
            for value in (
                raw.median_error,
                raw.p90_error,
                raw.failures,
                raw.saved,
                raw.under,
                raw.over,
                raw.bins,
            )
        ),
        *(_share(value) for value in (fitted.median_error, fitted.p90_error, fitted.failures)),
        *(
            _share(value)
            for value in (bound.failures, bound.saved, bound.under, bound.over, line.both_failures)
        ),
        _time(raw.seconds),
    ]
    name = f"**{line.name}**" if line.name.startswith("gpumemnet") else line.name
    return f"| {name} | {' | '.join(cells)} |"


def _share(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.1%}" if value < 1 else f"{value:.0%}"


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return "< 0.01" if seconds < 0.01 else f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}"


def _described(estimators: Sequence[PublishedEstimator]) -> list[tuple[str, str, str, str]]:
    return [(each.name, each.needs, each.leaves_out, each.source) for each in estimators]


def _without_nan(value: Any) -> Any:
    """``value`` for JSON: numbers of five digits, ``null`` for what is not known."""
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.5g}")
    if isinstance(value, Figures):
        return _without_nan(asdict(value))
    return value
