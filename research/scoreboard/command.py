"""``python -m research scoreboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.cli.output import print_result, progress_bar
from models.cli import COMMITTED_DATASETS


def scoreboard(
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder of the page; answers that it keeps are used again."),
    ],
    seconds: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            min=0,
            metavar="SECONDS",
            help="Time for estimators that need the model; 0: judge what is kept.",
        ),
    ] = None,
    cpu_seconds: Annotated[
        float,
        typer.Option(
            "--cpu-budget",
            min=0,
            metavar="SECONDS",
            help="Time for real runs on the CPU, which xMem needs.",
        ),
    ] = 600,
    renew: Annotated[
        list[str] | None,
        typer.Option("--renew", metavar="NAME", help="Ask this estimator again, once for each."),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="A small part, in a minute: two sets, few rows, nothing trained."
        ),
    ] = False,
) -> None:
    """Compare published estimators and ours on published runs; what was asked before is kept in the
    folder."""
    import torch

    from research.scoreboard.run import make_scoreboard

    torch.set_num_threads(1)  # seconds are those of one core
    with progress_bar("scoreboard") as progress:
        page = make_scoreboard(
            out,
            COMMITTED_DATASETS,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            renew=renew or (),
            smoke=smoke,
            command=f"python -m research scoreboard --out {out}",
            progress=progress,
            warn=lambda text: typer.echo(f"warning: {text}", err=True),
        )
    print_result({"page": page}, f"{page}: written", as_json=False)
