"""``gpumemnet releases``: keeps bundles in a registry and selects the champion."""

from __future__ import annotations

import getpass
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from gpumemnet.cli.commands import App
from gpumemnet.cli.options import REGISTRY, AsJson
from gpumemnet.cli.output import print_facts, print_json, print_result, print_table
from gpumemnet.predict.bundle import load_bundles
from gpumemnet.site.releases import Aliases, Registry, existing_registry

app: Final = App(add_completion=False)

Folder = Annotated[Path, REGISTRY]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the registry's history.")
]
_HISTORY_SHOWN: Final = 10


@app.callback()
def _releases() -> None:
    """Keep releases of bundles, and choose the one that predicts. Services that share the folder
    follow within a second."""


@app.command("list")
def list_releases(registry: Folder, as_json: AsJson = False) -> None:
    """List releases, the champion, and the champions so far."""
    store = existing_registry(registry)
    aliases, releases = store.aliases(), store.releases()
    if as_json:
        print_json(
            {"aliases": asdict(aliases), "releases": [asdict(release) for release in releases]}
        )
    else:
        _show(registry, aliases, releases)


def _show(registry: Path, aliases: Aliases, releases: Any) -> None:
    console = Console()
    columns = ("release", "is", "bundles", "made", "from", "note")
    rows = [
        (
            release.name,
            "champion" if release.name == aliases.champion else "",
            len(release.bundles),
            (release.created or "")[:16].replace("T", " "),
            release.parent or "",
            release.note,
        )
        for release in releases
    ]
    print_table(console, f"Registry {registry}", columns, rows)
    changes = [
        (change.since, f"{change.champion}, by {change.by or 'nobody'}: {change.reason}")
        for change in aliases.history
    ]
    if changes:
        print_facts(console, "Champions", changes[-_HISTORY_SHOWN:])


@app.command("add")
def add(
    release: Annotated[str, typer.Argument(metavar="RELEASE", help="Name of the release.")],
    bundle: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Bundle folders.")],
    registry: Folder,
    as_json: AsJson = False,
) -> None:
    """Copy bundles into the registry and make a release of them and the shipped ones for other jobs;
    it predicts once it is promoted."""
    folders = [one.source for one in load_bundles(*bundle)]
    made = Registry(registry).create_release(release, folders)
    print_result(asdict(made), f"release {made.name}: {len(made.bundles)} bundles", as_json=as_json)


@app.command("promote")
def promote(
    registry: Folder,
    release: Annotated[str, typer.Argument(metavar="RELEASE", help="Name of the release.")],
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Make a release champion: it predicts from now on."""
    store = existing_registry(registry)
    _print_aliases(store.set_champion(release, by=_user(), reason=reason), as_json)


@app.command("rollback")
def rollback(registry: Folder, reason: Reason = "", as_json: AsJson = False) -> None:
    """Make the previous champion champion again."""
    _print_aliases(existing_registry(registry).rollback(by=_user(), reason=reason), as_json)


def _print_aliases(aliases: Aliases, as_json: bool) -> None:
    print_result(asdict(aliases), f"champion {aliases.champion}", as_json=as_json)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
