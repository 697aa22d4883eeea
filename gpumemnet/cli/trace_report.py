"""Prints the result of a trace: the verdict, then the parts of the memory, the peak, and the
assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpumemnet.cli.output import print_facts
from gpumemnet.gpu.verdict import NO, UNSURE, VERDICT_TEXTS, YES
from gpumemnet.tracing.report.parts import PART_NAMES, TOP_MODULES, shown_mib
from gpumemnet.units import GIB, MIB, ceil_mib

if TYPE_CHECKING:
    from gpumemnet.tracing.report.answer import TraceAnswer

COLOURS: Final = {YES: "green", UNSURE: "yellow", NO: "red"}
_WIDE: Final = 110
"""Terminal width from which the report describes each part."""


def show_trace(answer: TraceAnswer, training: Sequence[str], console: Console) -> None:
    """Prints ``answer`` to ``console``; ``training`` describes how the model is trained."""
    console.print(_verdict(answer))
    workspaces = answer.convolution_workspaces
    source = (f"convolution workspaces: {workspaces}",) if workspaces else ()
    job = (
        answer.model,
        f"batch size {answer.batch_size:,}",
        *training,
        f"loss: {answer.loss}",
        *source,
    )
    console.print(Text(", ".join(job), style="dim"))
    _show_parts(answer, console)
    _show_peak(answer, console)
    if answer.batches or answer.max_batch_size is not None:
        _show_batches(answer, console)
    if answer.gpus:
        _show_gpus(answer, console)
    for note in answer.notes:
        console.print(Text.assemble(("note: ", "bold"), note))
    if answer.not_included:
        console.print(Text("Not included:", style="dim"))
        bullets = Table.grid(padding=(0, 1))
        for item in answer.not_included:
            bullets.add_row(Text(" ·", style="dim"), Text(item, style="dim"))
        console.print(bullets)


def _verdict(answer: TraceAnswer) -> Text:
    text = VERDICT_TEXTS[answer.verdict]
    headline = (f"{text[0].upper()}{text[1:]} {answer.gpu}", f"bold {COLOURS[answer.verdict]}")
    amounts = (
        f"{amount_text(answer.expected_bytes)} expected, {amount_text(answer.safe_bytes)} safe"
    )
    available = "" if answer.fits else f", {amount_text(answer.available_bytes)} available"
    each = "" if answer.ranks == 1 else f" on each of {answer.ranks:,} GPUs"
    return Text.assemble(headline, f": {amounts}{available}{each}")


def amount_text(amount_bytes: int) -> str:
    """Returns an amount in GiB and in whole MiB."""
    return f"{amount_bytes / GIB:,.2f} GiB ({ceil_mib(amount_bytes):,} MiB)"


def _show_parts(answer: TraceAnswer, console: Console) -> None:
    wide = console.width >= _WIDE
    table = _table("memory at the peak", "MiB", "share", "")
    if wide:
        table.add_column("", style="dim")
    amounts = shown_mib(list(answer.parts.values()))
    for (part, size), mib in zip(answer.parts.items(), amounts, strict=True):
        if not size:
            continue
        name, meaning = PART_NAMES.get(part, (part, ""))
        table.add_row(
            name, f"{mib:,}", *_share(size, answer.expected_bytes), *([meaning] if wide else [])
        )
    table.add_section()
    table.add_row(
        Text("expected", style="bold"), Text(f"{sum(amounts):,}", style="bold"), "100.0 %"
    )
    console.print(table)


def _show_peak(answer: TraceAnswer, console: Console) -> None:
    peak = answer.peak
    where = f"{peak.phase}, step {peak.step}" if peak.step else peak.phase
    module = f" in {peak.module}" if peak.module else ""
    facts = [
        ("peak", f"{where}: {peak.operator}{module}"),
        *(
            [("start-up", _startup(answer))]
            if answer.startup_peak_bytes > answer.expected_bytes
            else []
        ),
        (
            "least",
            f"{amount_text(answer.smallest_bytes)}: with less it runs out of memory, even if all that is cached is released",
        ),
        ("context", answer.context_source),
        ("safe", answer.safe_basis),
    ]
    print_facts(console, "", facts)
    table = _table("modules that hold most at the peak", "MiB", "share", "")
    top = peak.modules[:TOP_MODULES]
    for name, size in top:
        table.add_row(
            name or "(the model itself, loss)",
            f"{size / MIB:,.1f}",
            *_share(size, answer.expected_bytes),
        )
    rest = peak.modules[TOP_MODULES:]
    if rest:
        size = sum(amount for _, amount in rest)
        table.add_row(
            Text(f"{len(rest):,} others", style="dim"),
            f"{size / MIB:,.1f}",
            *_share(size, answer.expected_bytes),
        )
    console.print(table)


def _startup(answer: TraceAnswer) -> str:
    return f"takes up to {amount_text(answer.startup_peak_bytes)} and gives it back; cuDNN's search takes less where less is free"


def _show_batches(answer: TraceAnswer, console: Console) -> None:
    if answer.batches:
        table = _table("batch size", "expected MiB", "safe MiB", answer.gpu)
        for point in answer.batches:
            expected, safe = ceil_mib(point.expected_bytes), ceil_mib(point.safe_bytes)
            table.add_row(
                f"{point.batch_size:,}", f"{expected:,}", f"{safe:,}", verdict_text(point.verdict)
            )
        console.print(table)
    if answer.max_batch_size is not None:
        largest = (
            "no batch size fits"
            if answer.max_batch_size == 0
            else f"largest batch size that fits: {answer.max_batch_size:,}"
        )
        console.print(Text(f" {answer.gpu}: {largest}", style="bold"))


def _show_gpus(answer: TraceAnswer, console: Console) -> None:
    table = _table("GPU", "expected MiB", "safe MiB", "available MiB", "")
    for fit in answer.gpus:
        amounts = (fit.expected_bytes, fit.safe_bytes, fit.available_bytes)
        table.add_row(
            fit.gpu, *(f"{ceil_mib(amount):,}" for amount in amounts), verdict_text(fit.verdict)
        )
    console.print(table)


def verdict_text(verdict: str) -> Text:
    """Returns the words for a verdict, in its colour."""
    return Text(VERDICT_TEXTS[verdict], style=COLOURS[verdict])


def _share(amount: int, whole: int) -> tuple[str, str]:
    share = amount / whole
    return f"{share:.1%}".replace("%", " %"), "█" * round(20 * share)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    return table


_NUMBERS: Final = frozenset({"MiB", "share", "expected MiB", "safe MiB", "available MiB"})
