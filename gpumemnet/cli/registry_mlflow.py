"""``gpumemnet registry push`` and ``pull``: copies releases to and from an MLflow store."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Annotated, Final

import typer

from gpumemnet.cli.arguments import AsJson
from gpumemnet.errors import BundleError, InvalidRequestError, TrackingError
from gpumemnet.site.releases import Registry, existing_registry

ROLES: Final = ("champion", "challenger")

Folder = Annotated[
    Path,
    typer.Option(
        "--registry", envvar="GPUMEMNET_REGISTRY", help="The registry's folder.", show_default=False
    ),
]
Store = Annotated[
    str,
    typer.Option(
        "--tracking-uri",
        envvar="MLFLOW_TRACKING_URI",
        metavar="URI",
        help="sqlite:///mlflow.db or a server, https://…",
    ),
]
Model = Annotated[str, typer.Option("--tracking-model", help="Name of the registered model.")]


def push(
    registry: Folder,
    tracking_uri: Store,
    tracking_model: Model = "gpumemnet",
    as_json: AsJson = False,
) -> None:
    """Let champion and challenger of a model in MLflow be what they are in the registry."""
    from gpumemnet.site.mlflow import MlflowStore
    from gpumemnet.site.mlflow import push as push_releases

    moved = push_releases(existing_registry(registry), MlflowStore(tracking_uri, tracking_model))
    if as_json:
        typer.echo(json.dumps({"model": tracking_model, "moved": moved}, indent=2))
        return
    for alias, version in moved.items():
        typer.echo(
            f"{alias} is version {version} of {tracking_model}"
            if version != "none"
            else f"{tracking_model} has no {alias}"
        )
    if not moved:
        typer.echo("nothing has changed")


def pull(
    registry: Folder,
    tracking_uri: Store,
    alias: Annotated[
        str, typer.Option("--alias", help="Alias of the model in MLflow.")
    ] = "champion",
    role: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="champion|challenger",
            help="What it becomes here; the alias itself unless it is another.",
        ),
    ] = None,
    tracking_model: Model = "gpumemnet",
    every: Annotated[
        float | None,
        typer.Option(
            "--every", metavar="SECONDS", help="Repeat at this interval until interrupted."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: print one JSON object for each change.")
    ] = False,
) -> None:
    """Let the registry's champion be the release that an alias in MLflow points to; services on the
    registry follow.

    Bundles are checked before the registry hears of them. What was taken back here stays so, until
    the alias is moved again.
    """
    from gpumemnet.site.mlflow import MlflowStore, check_alias, check_store
    from gpumemnet.site.mlflow import pull as pull_release

    role = role or (alias if alias in ROLES else ROLES[0])
    if role not in ROLES:
        raise InvalidRequestError(f"must be {' or '.join(ROLES)}, not {role}", "as")
    if every is not None and not (math.isfinite(every) and every >= 1.0):
        raise InvalidRequestError("must be at least 1 second", "every")
    check_alias(alias, "alias")
    check_store(tracking_uri)
    store, last_message = Registry(registry), ""
    while True:
        try:
            answer = pull_release(
                store, MlflowStore(tracking_uri, tracking_model, must_exist=True), alias, role
            )
            message, is_error = json.dumps(asdict(answer)) if as_json else answer.sentence, False
        except (BundleError, TrackingError) as error:
            if every is None:
                raise
            message, is_error = f"warning: {error}", True
        if message != last_message:
            typer.echo(message, err=is_error)
        last_message = message
        if every is None:
            return
        sleep(every)
