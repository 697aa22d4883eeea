"""``gpumemnet serve``: starts the REST service.

The service replaces this process, so signals and exit code are the service's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from gpumemnet.cli.rooms import room
from gpumemnet.errors import MissingExtraError
from gpumemnet.sandbox.user_code import checkout_folder

_PACKAGES: Final = (
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "orjson",
    "pydantic_settings",
    "sqlalchemy",
    "prometheus_client",
)


def serve(
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; GPUMEMNET_HOST or 127.0.0.1 unless given."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="TCP port; GPUMEMNET_PORT or 8000 unless given.", min=0, max=65535),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that answer; GPUMEMNET_WORKERS or 1 unless given.", min=1),
    ] = None,
    bundle: Annotated[
        list[Path] | None,
        typer.Option(
            "--bundle",
            metavar="FOLDER",
            help="Bundle folder instead of the shipped ones; once per family.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU that answers are for where none is asked for; GPUMEMNET_GPU unless given."
        ),
    ] = None,
    context_mib: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            help="The site's CUDA context; GPUMEMNET_CONTEXT_MIB unless given.",
            min=1,
        ),
    ] = None,
    registry: Annotated[
        Path | None,
        typer.Option(help="Model registry to answer from; GPUMEMNET_REGISTRY unless given."),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            help="Where observations are kept, or 'off'; GPUMEMNET_DATABASE_URL unless given."
        ),
    ] = None,
) -> None:
    """Serve predictions over HTTP until interrupted. Other settings are environment variables."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "service", "serving")
    # -P: the current folder may hold a service of its own.
    arguments = [sys.executable, "-P", "-m", room("service")]
    if (checkout := checkout_folder()) is not None:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(checkout), os.environ.get("PYTHONPATH")))
        )
    for option, value in (
        ("--host", host),
        ("--port", port),
        ("--workers", workers),
        ("--bundles", bundle and os.pathsep.join(map(str, bundle))),
        ("--gpu", gpu),
        ("--context-mib", context_mib),
        ("--registry", registry),
        ("--database-url", database_url),
    ):
        if value is not None:
            arguments += [option, str(value)]
    sys.stdout.flush()
    os.execv(sys.executable, arguments)  # noqa: S606 - no shell is meant
