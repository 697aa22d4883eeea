"""Writes the scoreboard: a page, the same figures as JSON, and two pictures."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from research.estimators import dnnperf
from research.estimators.estimator import PublishedEstimator
from research.estimators.xmem import XMEM

from ..report.canvas import png
from .board import SAMPLE_TITLE, Line, Table
from .collect import FORMULAS, OF_MODELS
from .fitted import CLASSIFIER, TOTALS
from .ours import TRACE
from .pictures import bound_picture, error_picture
from .protocol import Figures
from .sets import RowSet

_LEARNT: Final = (
    ("SchedTune", "totals", "whatever its features do not say", "Albahar et al., CCGrid 2022"),
    (dnnperf.NAME, dnnperf.NEEDS, dnnperf.LEAVES_OUT, dnnperf.SOURCE),
    (
        "gpumemnet, line over the closed form",
        "layers",
        "nothing on purpose",
        "gpumemnet.predict.closed_form",
    ),
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
_CONTEXT: Final = (
    "On the A100 all errors *as it comes* are large for one reason, but for the real vision models. The readings contain a",
    "CUDA context of 1.4 to 1.9 GiB, of an old driver; the profile of today says 0.5. No estimate made beforehand can know",
    "that. The line takes it up. SchedTune has it *as it comes*, because it learns from readings of the same set.",
)
_WORDS: Final = """\
* **error**, **90th**: relative error of the estimate, median and 90th percentile, over rows with a reading.
* **failures**: probability of estimation failure. The estimate says that the run fits and it did not, or the other way
  round, or the run needs more than the estimate as its limit. No GPU was at hand to run it again: the least limit is
  the reading less what the simulated allocator could spare. For tools *as published* it is what their authors saw when
  they ran the job again on the GPU.
* **saved**: share of the GPU that the estimate leaves to others, in the mean; a failed run saves nothing.
* **under**: share of readings above the estimate. **over**: mean share by which estimates lie above the reading.
* **bin**: share of readings in the estimate's bin (1,000 MiB, or 8,000 MiB for CNNs, transformers and timm).
* **with a line**: slope · estimate + offset, fitted by least absolute relative error on the other folds. Folds hold
  whole architecture families (architectures, for sampled networks). **as a bound**: the estimator's own bound at 99 %
  (the trace's safe bytes among them) on the same line; else the line times the ratio that covers 99 % of the other
  folds. **both**: the line says whether a run fits, and the bound, at most the GPU's memory, is its limit.
* **seconds**: median of one estimate on one core of a shared machine, building the model included, training not.

What a table does not show was not computed yet: the nightly run adds what takes long, such as real runs on the CPU. The
sample is the beginning of one random order of the rows (seed 0), and runs on the CPU are of its jobs up to 2 GiB.

On the GeForce cards MemTracker's line fails less than that of the trace, though its error is larger. Readings lie a few
MiB above the trace, and language models have nothing to spare. An estimate without a margin that is right within 1 %
is then too low for every other run. MemTracker errs upwards on these models, by 5 to 8 %, and downwards on CNNs, whose
workspaces can shrink. A limit needs a margin, which is what the bound is for: see the column **both**.

Our DNNMem errs less on the GeForce cards than the published one, by 14 points in the median. The granularity of its
graph explains 8 of them, as *DNNMem, graph of modules* shows. That graph gives the published answer for VGG, and is as
far too low for GPT-2. It does not explain ConvNeXt and T5, half of the rows. On ConvNeXt the published one is 29 % too
low, where both of ours are 8 % too high. On T5 it is 14 % too high, where ours are 6 and 21 % too low. If GELU ran in
place, as ReLU does, ours would be 19 % too low on ConvNeXt. On MobileNet and RegNet the published one is nearer, as it
holds the framework's memory of the very run. Our xMem takes no reading of the run that it predicts.

DNNPerf learns on real networks from jobs over all training options, such as kernels of attention and recomputation. Its
graph tells nothing of these; that is where its large errors on language models come from.

Runs that ran out of memory are censored: they count for failures and savings only. Readings known to have caught the
search of `cudnn.benchmark` are left out. Tables are sorted by the better of the two median errors.
"""


def write_page(
    out: Path,
    sets: Mapping[str, tuple[RowSet, Sequence[Table]]],
    agreements: Mapping[str, Mapping[str, tuple[int, float]]],
    stale: Mapping[str, Sequence[str]],
    command: str,
) -> Path:
    """Write ``index.md``, ``results.json`` and two pictures into ``out``; returns the page's path.

    Args:
        out: the folder.
        sets: title of a set → its rows and its tables.
        agreements: title of a set → tool → how the simulated test of a limit agrees with repeated
            runs.
        stale: title of a set → estimators whose kept answers rest on earlier code or data.
        command: that makes the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    shown = {title: _main_table(made) for title, (_, made) in sets.items() if made}
    lines = [
        "# Scoreboard: published estimators on published runs",
        "",
        *_claims(shown),
        "",
        *_CONTEXT,
        "",
        *_firsts(shown),
        "",
        *_preface(command),
        "",
    ]
    for name, draw, words in (
        (
            "error.png",
            error_picture,
            "Error against seconds: hollow as it comes, filled with a line",
        ),
        (
            "bound.png",
            bound_picture,
            "Under-rate against over-allocation: hollow as it comes, filled as a bound",
        ),
    ):
        replace_file(out / name, png(draw(shown)))
        lines += [
            f"![{words}]({name})",
            "",
            f"*{words}. One panel a set, on the rows of its sample.*",
            "",
        ]
    lines += ["## How to read the tables", "", _WORDS]
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
        if stale[title]:
            names = ", ".join(stale[title])
            lines += [
                *textwrap.wrap(
                    f"*Answered by earlier code or from earlier data, and to be renewed: {names}.*",
                    118,
                ),
                "",
            ]
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
    lines += ["", *_HOW_TO_ADD]
    replace_file(
        out / "results.json", (json.dumps(_without_nan(document), indent=1) + "\n").encode()
    )
    path = out / "index.md"
    replace_file(path, ("\n".join(lines) + "\n").encode())
    return path


def _preface(command: str) -> list[str]:
    return [
        f"`{command}` makes this page; answers that take time are kept beside",
        "it and asked for only once. `--time-budget 0 --cpu-budget 0` makes it from the kept ones in half a minute, `--smoke`",
        "does a small part of it from nothing in a minute. Models need timm 1.0.9, torchvision and transformers 4.51.3.",
        "",
        "Every estimator answers for the same rows by one protocol, that of xMem (arXiv 2510.21048). Re-implementations",
        "follow the papers; what a paper leaves open is said in the docstring of its module in `research/estimators/`. On",
        "the runs of the GeForce cards, the tools' own published estimates stand beside them. There xMem and DNNMem had",
        "what no estimate made beforehand can know: the framework's memory, read from the very run that is predicted.",
    ]


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


def _claims(shown: Mapping[str, Table]) -> list[str]:
    """What the tables say of our estimators, and where others are first, in sentences."""
    won = {name: len(_sets_won(shown, figure, {TRACE.name})) for name, figure in _JUDGED.items()}
    cheap = [_without_model(table) for table in shown.values()]
    classified = sum(_is_first(lines, _WITH_LINE, {CLASSIFIER, TOTALS}) for lines in cheap)
    of_ours = sum(_is_first(lines, _WITH_LINE, _ours(lines)) for lines in cheap)
    count = len(shown)
    lines = [
        f"* **Error.** With a line, our trace has the lowest median error on {won['error, with a line']} of {count} sets, alone "
        "or with others.",
        f"* **Failures.** Our trace fails least on {won['failures, as it comes']} of {count} sets as it comes, and on "
        f"{won['failures, with a line']} with a line. Where the line says whether a run fits and the bound is its limit, it is "
        f"on {won['failures, estimate and bound']}.",
        f"* **No model code.** Among estimators that need no model, one of ours has the lowest error with a line on {of_ours} of "
        f"{count} sets, and a classifier on {classified}:",
        *(f"    * {title}: {_no_model(_without_model(table))}." for title, table in shown.items()),
        "* **Where we lose**, with the best of ours beside whoever is first:",
        *_losses(shown),
    ]
    return [
        row
        for line in lines
        for row in textwrap.wrap(line, 118, subsequent_indent=" " * (line.index("*") + 2))
    ]


def _no_model(lines: Sequence[Line]) -> str:
    """Who is first without a model, and our classifiers."""
    figures = {
        line.name: _share(_WITH_LINE(line)) for line in lines if line.name in (CLASSIFIER, TOTALS)
    }
    found = [f"{name.removeprefix('gpumemnet, ')} {figure}" for name, figure in figures.items()]
    return "; ".join(
        [f"first {_first(lines, _WITH_LINE)}", *(found or ["our classifiers are not trained yet"])]
    )


def _ours(lines: Sequence[Line]) -> set[str]:
    return {line.name for line in lines if line.name.startswith("gpumemnet")}


def _is_first(
    lines: Sequence[Line], figure: Callable[[Line], float], names: Collection[str]
) -> bool:
    """Whether one of ``names`` has the lowest figure, as it is shown."""
    known = {line.name: _share(figure(line)) for line in lines if not math.isnan(figure(line))}
    lowest = min((figure(line) for line in lines if line.name in known), default=math.nan)
    return any(known.get(name) == _share(lowest) for name in names)


def _sets_won(
    shown: Mapping[str, Table], figure: Callable[[Line], float], names: Collection[str]
) -> list[str]:
    return [title for title, table in shown.items() if _is_first(table.lines, figure, names)]


def _losses(shown: Mapping[str, Table]) -> list[str]:
    """For each column the sets in which none of ours is first."""
    columns = [
        (name, figure, {title: list(table.lines) for title, table in shown.items()})
        for name, figure in _JUDGED.items()
    ]
    columns.append(
        (_NO_MODEL, _WITH_LINE, {title: _without_model(table) for title, table in shown.items()})
    )
    found = []
    for name, figure, lines_of in columns:
        words = []
        for title, lines in lines_of.items():
            ours = _ours(lines)
            known = [line for line in lines if line.name in ours and not math.isnan(figure(line))]
            if known and not _is_first(lines, figure, ours):
                words.append(
                    f"{title}, {_first(lines, figure)}, ours {_share(min(map(figure, known)))}"
                )
        if words:
            found.append(f"    * {name}: {'; '.join(words)}.")
    return found or ["    * in none of the columns below."]


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


_HOW_TO_ADD: Final = (
    "## Add an estimator in twenty lines",
    "",
    "An estimator is a function from a subject to the parts of its memory in bytes. Put it into `research/estimators/`, name",
    "it in `FORMULAS` (it needs the job only) or `OF_MODELS` (it needs the model) of",
    "`research/scoreboard/collect.py`, and run the command again: it asks the new estimator and keeps the others'",
    "answers.",
    "",
    "```python",
    '"""Twice the activations and four copies of the weights."""',
    "",
    "from research.estimators.estimator import NotCoveredError, PublishedEstimator, Subject",
    "",
    "",
    "def parts(subject: Subject) -> dict[str, int]:",
    '    """The parts of a job\'s memory, in bytes."""',
    "    job = subject.job  # layers, totals, batch size, optimizer, precision; subject.training() builds the model",
    '    if job.precision != "fp32":',
    '        raise NotCoveredError("fp32 only")',
    "    activations = 4 * job.batch_size * (job.total_activations or 0)",
    "    copies = 16 * (job.total_parameters or 0)",
    '    return {"activations": 2 * activations, "copies": copies, "context": subject.context_bytes}',
    "",
    "",
    'MINE = PublishedEstimator(name="mine", needs="totals", leaves_out="allocator, workspaces", source="this page", parts=parts)',
    "```",
)
