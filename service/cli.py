"""The commands ``gpumemnet serve``, ``keys`` and ``observations``."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpumemnet.cli.commands import App
from gpumemnet.cli.options import AsJson, Bundles, RegistryFolder, input_file
from gpumemnet.cli.output import print_result
from gpumemnet.client import API_KEY_VARIABLE, Client
from gpumemnet.errors import ServiceError
from gpumemnet.job.layers import listed
from gpumemnet.site.observations import OBSERVATION_FIELDS, Observation
from gpumemnet.site.sacct import Skipped, read_sacct

from .api.access import SCOPES, new_key

_REFUSED: Final = (404, 409, 422)
"""Statuses that are about one observation; the others end the import, which may be repeated."""
_TIMEOUT_SECONDS: Final = 30.0

keys = App(add_completion=False)
observations = App(add_completion=False)


def serve(
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; GPUMEMNET_HOST or 127.0.0.1 by default."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=65535, help="TCP port; GPUMEMNET_PORT or 8000 by default."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Processes that predict; GPUMEMNET_WORKERS or 1 by default.",
        ),
    ] = None,
    bundle: Bundles = None,
    registry: RegistryFolder = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where observations are kept, or 'off'; GPUMEMNET_DATABASE_URL by default.",
        ),
    ] = None,
) -> None:
    """Serve predictions over HTTP until interrupted. Other settings are environment variables."""
    from .__main__ import main

    given = {
        "host": host,
        "port": port,
        "workers": workers,
        "bundles": bundle and os.pathsep.join(map(str, bundle)),
        "registry": registry,
        "database_url": database_url,
    }
    raise typer.Exit(main({name: str(value) for name, value in given.items() if value is not None}))


@keys.callback()
def _keys() -> None:
    """Make API keys for the service."""


@keys.command("new")
def make_key(
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Whose key it is: letters, digits, '.', '_' and '-'."),
    ],
    scopes: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Some of {', '.join(SCOPES)}, joined by '+'.")
    ] = "predict",
    as_json: AsJson = False,
) -> None:
    """Make a key: prints it this once, and the entry for the settings."""
    key, entry = new_key(name, scopes)
    print_result(
        {"key": key, "entry": entry},
        f"key, shown this once and stored nowhere; clients send it as 'Authorization: Bearer KEY':\n  {key}\n"
        f"entry for GPUMEMNET_API_KEYS (separated by commas) or a line of GPUMEMNET_API_KEYS_FILE:\n  {entry}",
        as_json=as_json,
    )


@observations.callback()
def _observations() -> None:
    """Collect what finished jobs used."""


@observations.command("export")
def export_observations(
    out: Annotated[Path, typer.Option(metavar="FILE.parquet", help="Parquet file to write.")],
    database_url: Annotated[
        str,
        typer.Option(
            envvar="GPUMEMNET_DATABASE_URL",
            metavar="URL",
            help="The service's database.",
            show_default=False,
        ),
    ],
    since: Annotated[
        datetime | None,
        typer.Option(
            metavar="TIME",
            formats=[
                "%Y-%m-%d",
                "%Y-%m-%dT%H:%M:%S",
                "%Y-%m-%dT%H:%M:%S%z",
                "%Y-%m-%dT%H:%M:%S.%f%z",
            ],
            help="Leave out what was received before, such as 2026-01-31 or 2026-01-31T12:00:00+01:00; UTC unless an offset is given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the observations as a dataset to train on."""
    from .observations.export import export

    if since is not None and since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    written, left_out = export(
        database_url, out, since=None if since is None else since.timestamp()
    )
    print_result(
        {"written": written, "left_out": left_out, "file": out},
        f"{written} observations in {out}; {left_out} left out that say nothing of the memory",
        as_json=as_json,
    )


@observations.command("import-sacct")
def import_sacct(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Output of sacct --json; - for standard input.",
        ),
    ],
    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help=f"Send them to this service; a key is taken from {API_KEY_VARIABLE}.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Report what finished Slurm jobs used to a service."""
    found = read_sacct(input_file(file))
    skipped: dict[str, list[str]] = defaultdict(list)
    counts = _send(found, url.rstrip("/"), skipped)
    message = f"{counts['stored']} observations stored, {counts['there_before']} were there before"
    reasons = [
        f"{len(some)} jobs left out: {reason}: {listed(some)}" for reason, some in skipped.items()
    ]
    print_result({**counts, "left_out": skipped}, "\n".join([*reasons, message]), as_json=as_json)


def _send(
    found: Iterator[Observation | Skipped], url: str, skipped: dict[str, list[str]]
) -> dict[str, int]:
    """Report the observations to a service; each is stored once, however often it is sent."""
    counts = {"stored": 0, "there_before": 0}
    with Client(url, timeout_seconds=_TIMEOUT_SECONDS) as client:
        for one in found:
            if isinstance(one, Skipped):
                skipped[one.reason].append(one.job_id or one.location)
                continue
            observed: Any = {name: getattr(one, name) for name in OBSERVATION_FIELDS}
            try:
                answer = client.observe(**observed)
            except ServiceError as error:
                if error.status not in _REFUSED:
                    raise
                skipped[f"the service: {error.problem['detail']}"].append(one.idempotency_key or "")
            else:
                counts["stored" if answer["created"] else "there_before"] += 1
    return counts
