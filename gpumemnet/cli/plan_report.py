"""Prints a plan: what the job needs, the plan that makes it fit, and the other changes that
would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpumemnet.cli.output import print_facts
from gpumemnet.cli.trace_report import COLOURS, amount_text, verdict_text
from gpumemnet.gpu.verdict import YES
from gpumemnet.planner.answer import (
    DECISION_TEXTS,
    FITS,
    Alternative,
    PlanAnswer,
    units_by_decision,
)
from gpumemnet.planner.decisions import Plan
from gpumemnet.tracing.report.answer import TraceAnswer
from gpumemnet.units import ceil_mib, format_bytes

_SHORT: Final = 2
"""Lines of code of a setting that is printed."""


def show_plan(answer: PlanAnswer, training: Sequence[str], console: Console) -> None:
    """Prints ``answer`` to ``console``; ``training`` describes how the model is trained."""
    before = answer.before
    console.print(_need(answer))
    console.print(
        Text(
            ", ".join(
                (
                    before.model,
                    f"batch size {before.batch_size:,}",
                    *training,
                    f"loss: {before.loss}",
                )
            ),
            style="dim",
        )
    )
    print_facts(console, "", [("peak", _peak(before)), ("safe", before.safe_basis)])
    if answer.plan is not None and answer.after is not None:
        _show_plan(answer.plan, answer.after, console)
    _show_knobs(answer, console)
    if answer.reason:
        console.print(Text.assemble("\n", ("No plan fits", "bold red"), f": {answer.reason}"))
    if answer.alternatives:
        _show_alternatives(answer.alternatives, console)
    for note in dict.fromkeys((*before.notes, *(answer.plan.notes if answer.plan else ()))):
        console.print(Text.assemble(("note: ", "bold"), note))


def _need(answer: PlanAnswer) -> Text:
    before = answer.before
    amounts = (
        f"{amount_text(before.expected_bytes)} expected, {amount_text(before.safe_bytes)} safe"
    )
    verdict = before.verdict
    headline = (
        "Fits as it is" if answer.outcome == FITS else verdict_text(verdict).plain.capitalize()
    )
    colour = f"bold {COLOURS[verdict]}"
    return Text.assemble(
        (f"{headline}", colour),
        f": {amounts}, {amount_text(before.available_bytes)} available on {before.gpu}",
    )


def _peak(answer: TraceAnswer) -> str:
    peak = answer.peak
    where = f"{peak.phase}, step {peak.step}" if peak.step else peak.phase
    return f"{where}: {peak.operator}{f' in {peak.module}' if peak.module else ''}"


def _show_plan(plan: Plan, after: TraceAnswer, console: Console) -> None:
    amounts = f"{amount_text(after.expected_bytes)} expected, {amount_text(after.safe_bytes)} safe"
    console.print(Text.assemble("\n", ("A plan fits", f"bold {COLOURS[YES]}"), f": {amounts}"))
    facts = [
        (DECISION_TEXTS[decision], units) for decision, units in units_by_decision(plan).items()
    ]
    facts.append(
        (
            "step",
            f"{_seconds(plan.step_seconds)} instead of {_seconds(plan.keep_step_seconds)}: {_percent(plan.slowdown)}, modelled",
        )
    )
    if plan.host_bytes:
        facts.append(("host memory", f"{format_bytes(plan.host_bytes)}, pinned"))
    facts.append(("peak", _peak(after)))
    facts.append(("search", _search(plan)))
    print_facts(console, "", facts)


def _show_knobs(answer: PlanAnswer, console: Console) -> None:
    """Prints the settings of libraries with the effect of the plan, those of a line or two; JSON
    has all of them."""
    for knob in answer.knobs:
        if knob.code and len(knob.code.splitlines()) <= _SHORT:
            head = f"by a setting of {knob.library}" + (
                f" ({knob.note.rstrip('.')})" if knob.note else ""
            )
            console.print(Text.assemble(f"{head}:\n", (knob.code.rstrip(), "cyan")))


def _search(plan: Plan) -> str:
    text = f"{plan.optimizer}, {plan.planning_seconds:.2g} s"
    if plan.gap is None:
        return text
    return f"{text}; " + (
        "no plan is faster"
        if plan.gap < 5e-4
        else f"the fastest plan is at most {100 * plan.gap:.1f} points faster"
    )


def _show_alternatives(alternatives: Sequence[Alternative], console: Console) -> None:
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        header_style="bold",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("instead of a plan", overflow="fold")
    for name in ("expected MiB", "safe MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    for each in alternatives:
        step = "" if each.slowdown is None else _percent(each.slowdown)
        amounts = (f"{ceil_mib(each.expected_bytes):,}", f"{ceil_mib(each.safe_bytes):,}")
        words = Text.assemble(each.change, (f"\n{each.how}", "cyan"), (f"\n{each.effect}", "dim"))
        table.add_row(words, *amounts, verdict_text(each.verdict), step)
    console.print(table)


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
