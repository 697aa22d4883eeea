"""``gpumemnet models``: lists the bundles with the facts on their cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gpumemnet.cli.output import print_facts
from gpumemnet.predict.bundle import Bundle, load_bundles, shipped_bundles


def models(
    bundle: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER...", help="Bundle folders; the shipped ones unless given."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: the whole cards as a JSON list.")
    ] = False,
) -> None:
    """List the bundles that answer, and check their checksums."""
    bundles = (
        [one for folder in bundle for one in load_bundles(folder)]
        if bundle
        else list(shipped_bundles())
    )
    if as_json:
        typer.echo(
            json.dumps([{**one.card.document, "sha256": one.sha256} for one in bundles], indent=2)
        )
        return
    console = Console()
    for one in bundles:
        print_facts(console, f"{one.card.name}, version {one.card.version}", _facts(one))


def _facts(bundle: Bundle) -> list[tuple[str, str]]:
    card, data = bundle.card, bundle.card.document.get("training_data", {})
    seen = {
        field: [str(value) for value in values if value not in (None, False)]
        for field, values in card.options.items()
    }
    options = "; ".join(
        f"{field} {' or '.join(values)}" for field, values in seen.items() if values
    )
    return [
        ("answers for", f"{', '.join(card.families)} jobs on {card.gpu}"),
        (
            "trained on",
            f"{data.get('rows', 0):,} {data.get('provenance', '')} jobs: {data.get('description', '')}",
        ),
        *((name, str(data[name])) for name in ("licence", "credit") if name in data),
        ("with", options),
        ("sha256", bundle.sha256),
        ("folder", bundle.source),
    ]
