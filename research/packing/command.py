"""``python -m research pack``: compares memory estimators in a simulated cluster, on a trace of its jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from gpumemnet.atomic_files import check_writable, write_output
from gpumemnet.cli.options import AsJson, Bundles, Coverage, Encoder, Seed, input_file
from gpumemnet.cli.output import print_columns
from gpumemnet.errors import InvalidRequestError
from gpumemnet.predict.gpu_fit import MAX_FREE_MIB
from gpumemnet.predict.prediction import DEFAULT_COVERAGE

if TYPE_CHECKING:
    from research.packing.report import Figures, Report


def pack(
    trace: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Jobs with the memory they took (.parquet, .csv, .jsonl); - reads JSON Lines from standard input.",
        ),
    ],
    gpus: Annotated[
        str,
        typer.Option(
            metavar="NAME:COUNT,…", help="The cluster, such as A100:8,H200:4 or A100/3g.20gb:16."
        ),
    ],
    jobs: Annotated[
        int | None,
        typer.Option(help="Number of jobs to draw from the rows; each row once unless given."),
    ] = None,
    load: Annotated[
        float,
        typer.Option(
            help="Jobs per GPU that would run if none had to wait; sets the rate of drawn arrivals."
        ),
    ] = 2.0,
    median_seconds: Annotated[
        float, typer.Option(help="Median of the drawn durations, which are log-normal.")
    ] = 3600.0,
    seed: Seed = 0,
    fit: Annotated[
        str,
        typer.Option(
            metavar="best|first|spread", help="Which of the GPUs that can hold a job gets it."
        ),
    ] = "best",
    backfill: Annotated[
        int, typer.Option(help="How many waiting jobs may overtake one that does not fit.")
    ] = 0,
    ramp_seconds: Annotated[
        float, typer.Option(help="Time from a job's start to its peak.")
    ] = 60.0,
    unknown_mib: Annotated[
        int | None,
        typer.Option(
            help="Memory set aside where an estimator has no answer (CARMA: 40000); a whole GPU unless given."
        ),
    ] = None,
    headroom_mib: Annotated[
        int, typer.Option(help="Added to every estimate but the oracle's (CARMA: 2048).")
    ] = 0,
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this one, once for each; all that have an answer unless given.",
        ),
    ] = None,
    coverage: Coverage = DEFAULT_COVERAGE,
    bundle: Bundles = None,
    encoder: Encoder = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the comparison: .png, .svg or .pdf.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON document to this file too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a cluster that places jobs by each estimator. Compares jobs per GPU, out-of-memory
    errors, waste and waiting."""
    from gpumemnet.predict.predictor import (
        Predictor,
    )  # onnxruntime takes a tenth of a second that --help need not wait for
    from research.packing.amounts import estimators as amounts_of
    from research.packing.cluster import Policy, inventory
    from research.packing.picture import check_picture, draw
    from research.packing.report import report
    from research.packing.trace import read_trace, workload

    for name, amount in (("unknown_mib", unknown_mib), ("headroom_mib", headroom_mib)):
        if amount is not None and not 0 <= amount <= MAX_FREE_MIB:
            raise InvalidRequestError(f"must be from 0 to {MAX_FREE_MIB}, not {amount}", name)
    cards = inventory(gpus)
    policy = Policy(fit=fit, backfill=backfill, ramp_seconds=ramp_seconds)
    if plot is not None:
        check_picture(plot)
        check_writable(plot, "plot")
    if out is not None:
        check_writable(out)
    rows = read_trace([input_file(path) for path in trace])
    work = workload(
        rows, cards.cards, jobs=jobs, load=load, median_seconds=median_seconds, seed=seed
    )
    predictor = Predictor.load(*bundle) if bundle else Predictor.default()
    found = amounts_of(
        rows.rows,
        cards,
        predictor,
        only=estimator or None,
        coverage=coverage,
        encoder=encoder,
        unknown_mib=unknown_mib,
        headroom_mib=headroom_mib,
    )
    made = report(rows, work, cards, policy, found, predictor.bundles)
    document = json.dumps(made.document, indent=2) + "\n"
    if plot is not None:
        draw(made, plot)
    if out is not None:
        write_output(out, document.encode())
    if as_json:
        typer.echo(document, nl=False)
    else:
        _show(made)


def _show(made: Report) -> None:
    console = Console()
    console.print(Text(f"{made.jobs:,} jobs on {made.inventory}"))
    for cells in (_packed, _spent):  # two tables, so that 80 columns are enough
        rows = [(line.title, *cells(line).values()) for line in made.figures]
        print_columns(console, "memory set aside by", [*cells(made.figures[0])], rows)
    for note in made.notes:
        console.print(Text(f"· {note}"))


def _packed(line: Figures) -> dict[str, str]:
    """Heading → cell: how densely the jobs ran, and what went wrong."""
    return {
        "shared": f"{line.collocated_share:.0%}",
        "jobs a GPU": f"{line.jobs_per_gpu:.2f}",
        "OOMs": f"{line.ooms:,}",
        "put alone": f"{line.alone:,}",
        "lost hours": f"{line.lost_hours:,.1f}",
    }


def _spent(line: Figures) -> dict[str, str]:
    """Heading → cell: the memory and the time that it took."""
    return {
        "waste GiB·h": f"{line.waste_gib_hours:,.0f}",
        "waste": f"{line.waste_share:.0%}",
        "done after h": f"{line.makespan_hours:,.1f}",
        "wait h": f"{line.wait_hours:,.1f}",
        "GPU hours": f"{line.gpu_hours:,.0f}",
    }
