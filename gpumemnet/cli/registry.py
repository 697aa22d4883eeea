"""``gpumemnet registry``: stores bundles in a registry and selects the champion and the
challenger."""

from __future__ import annotations

import getpass
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from gpumemnet.cli.arguments import AsJson, input_file
from gpumemnet.cli.output import print_facts, print_table
from gpumemnet.cli.registry_mlflow import Folder, pull, push
from gpumemnet.errors import RegistryError
from gpumemnet.predict.bundle import load_bundles
from gpumemnet.site.releases import SHIPPED, Aliases, Registry, existing_registry

registry: Final = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="RELEASE", help="Name of the release.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it stays in the registry's history.")]
_HISTORY_SHOWN: Final = 10


@registry.callback()
def _registry() -> None:
    """Keep releases of bundles, and choose which one answers. Services that share the folder follow
    within a second."""


@registry.command("add")
def add(
    release: Name,
    bundle: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Bundle folders.")],
    registry: Folder,
    parent: Annotated[
        str,
        typer.Option(
            help="The release whose bundles the given ones join, or replace where they answer for the same."
        ),
    ] = SHIPPED,
    lineage: Annotated[
        Path | None, typer.Option(help="JSON file that says what made it: data, code, seeds.")
    ] = None,
    note: Annotated[str, typer.Option(help="A sentence for readers.")] = "",
    as_json: AsJson = False,
) -> None:
    """Copy bundles into the registry and make a release of them; nothing answers from it yet."""
    made_by = {} if lineage is None else _lineage(input_file(lineage))
    found = [
        one for folder in bundle for one in load_bundles(folder)
    ]  # all of them before the first is written
    store = Registry(registry)
    hashes = [store.add_bundle(one.source).sha256 for one in found]
    made = store.create_release(release, hashes, parent=parent, lineage=made_by, note=note)
    message = (
        json.dumps(asdict(made), indent=2)
        if as_json
        else f"release {made.name}: {len(made.bundles)} bundles"
    )
    typer.echo(message)


@registry.command("list")
def list_releases(registry: Folder, as_json: AsJson = False) -> None:
    """List releases, champion, challenger, and the champions so far."""
    store = existing_registry(registry)
    aliases, releases = store.aliases(), store.releases()
    if as_json:
        typer.echo(
            json.dumps(
                {"aliases": asdict(aliases), "releases": [asdict(release) for release in releases]},
                indent=2,
            )
        )
        return
    console = Console()
    print_table(
        console,
        f"Registry {registry}",
        ("release", "is", "bundles", "made", "from", "note"),
        [
            (
                release.name,
                _alias(aliases, release.name),
                len(release.bundles),
                (release.created or "")[:16].replace("T", " "),
                release.parent or "",
                release.note,
            )
            for release in releases
        ],
    )
    changes = [
        (change.since, f"{change.champion}, by {change.by or 'nobody'}: {change.reason}")
        for change in aliases.history
    ]
    if changes:
        print_facts(console, "Champions", changes[-_HISTORY_SHOWN:])


@registry.command("champion")
def champion(release: Name, registry: Folder, reason: Reason = "", as_json: AsJson = False) -> None:
    """Make a release champion: it answers from now on."""
    _say(existing_registry(registry).set_champion(release, by=_user(), reason=reason), as_json)


@registry.command("challenger")
def challenger(
    registry: Folder,
    release: Annotated[
        str | None, typer.Argument(metavar="RELEASE", help="Name of the release.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove the challenger.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a release challenger: it predicts beside the champion, and its answers are only
    compared."""
    if none == (release is not None):
        raise RegistryError("name a release, or give --none")
    _say(existing_registry(registry).set_challenger(release), as_json)


@registry.command("rollback")
def rollback(registry: Folder, reason: Reason = "", as_json: AsJson = False) -> None:
    """Make the previous champion champion again."""
    _say(existing_registry(registry).rollback(by=_user(), reason=reason), as_json)


registry.command("push")(push)
registry.command("pull")(pull)


@registry.command("verify")
def verify(registry: Folder, as_json: AsJson = False) -> None:
    """Check every release and the checksums of every bundle; exit code 2 when something is
    wrong."""
    problems = existing_registry(registry).verify()
    if as_json:
        typer.echo(json.dumps({"problems": problems}, indent=2))
    for problem in () if as_json else problems:
        typer.echo(problem)
    if problems:
        raise RegistryError(
            f"{len(problems)} {'thing is' if len(problems) == 1 else 'things are'} wrong in {registry}"
        )
    if not as_json:
        typer.echo("every release is whole")


@registry.command("prune")
def prune(
    registry: Folder,
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Delete all but the newest N releases too; champion, challenger and the champion before stay.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete bundles that no release holds, and what interrupted commands left behind."""
    deleted = existing_registry(registry).prune(keep_releases=keep)
    if as_json:
        typer.echo(json.dumps({"deleted": deleted}, indent=2))
        return
    for name in deleted:
        typer.echo(f"deleted {name}")
    if not deleted:
        typer.echo("nothing to delete")


def _say(aliases: Aliases, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(aliases), indent=2))
        return
    typer.echo(f"champion {aliases.champion}, challenger {aliases.challenger or 'none'}")


def _alias(aliases: Aliases, name: str) -> str:
    return (
        "champion"
        if name == aliases.champion
        else "challenger"
        if name == aliases.challenger
        else ""
    )


def _lineage(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise RegistryError(f"{path}: must hold a JSON object that says what made the bundles")
    return document


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
