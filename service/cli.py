"""The commands ``gpumemnet keys`` and ``gpumemnet observations``."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from gpumemnet.cli.arguments import AsJson
from gpumemnet.errors import InvalidRequestError

from .middleware.keys import SCOPES, new_key

keys = typer.Typer(no_args_is_help=True, add_completion=False)
observations = typer.Typer(no_args_is_help=True, add_completion=False)


@keys.callback()
def _keys() -> None:
    """Make API keys for the service."""


@keys.command("new")
def make_key(
    name: Annotated[str, typer.Option(help="Whose key it is: letters, digits, '.', '_' and '-'.")],
    scopes: Annotated[
        str, typer.Option(help=f"Some of {', '.join(SCOPES)}, joined by '+'.")
    ] = "predict",
    as_json: AsJson = False,
) -> None:
    """Make a key: prints it this once, and the entry for the settings."""
    key, entry = new_key(name, scopes)
    if as_json:
        typer.echo(json.dumps({"key": key, "entry": entry}))
        return
    typer.echo(
        f"key, shown this once and stored nowhere; clients send it as 'Authorization: Bearer KEY':\n  {key}\n"
        f"entry for GPUMEMNET_API_KEYS (separated by commas) or a line of GPUMEMNET_API_KEYS_FILE:\n  {entry}"
    )


@observations.callback()
def _observations() -> None:
    """Export what finished jobs used."""


@observations.command("export")
def export_observations(
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    database_url: Annotated[
        str,
        typer.Option(
            envvar="GPUMEMNET_DATABASE_URL", help="The service's database.", show_default=False
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(
            help="Leave out what was received before, such as 2026-01-31 or 2026-01-31T12:00:00+01:00."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the observations as a dataset to train on."""
    from .observations.export import export

    written, left_out = export(database_url, out, since=_seconds(since))
    if as_json:
        typer.echo(json.dumps({"written": written, "left_out": left_out, "file": str(out)}))
        return
    typer.echo(
        f"{written} observations in {out}; {left_out} left out that say nothing of the memory"
    )


def _seconds(text: str | None) -> float | None:
    """A date or a time as seconds since the epoch; UTC unless it has an offset."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(
            f"must be a date or a time such as 2026-01-31T12:00:00Z, not '{text[:40]}'", "since"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
