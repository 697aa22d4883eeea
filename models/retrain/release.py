"""Puts accepted models into the registry: bundles, release with its lineage, alias; and reports the
result.

The release's name comes from the hash of the run, so a run that was killed between two of these
steps finds what it made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpumemnet.errors import RegistryError, UnknownReleaseError
from gpumemnet.predict.bundle import load_bundle
from gpumemnet.site.releases import Aliases, Change, Registry

from .request import NOTHING_BETTER, PROMOTED, Outcome, Request

MADE_BY = "models retrain"


def put_into_service(
    request: Request, document: dict[str, Any], report: Path, champion: str
) -> Outcome:
    """Change the registry as the report and the request say.

    Raises:
        RegistryError: when the registry cannot be written to, or another has changed the champion
            meanwhile.
        BundleError: when a candidate was altered or removed since it was trained.
    """
    name = document["release"]
    accepted = [track for track in document["tracks"] if track["promote"]]

    def outcome(exit_code: int, sentence: str, release: str | None = None) -> Outcome:
        return Outcome(
            exit_code=exit_code,
            sentence=sentence,
            release=release,
            report=report,
            document=document,
        )

    if not accepted:
        why = "; ".join(document.get("missing", ())) or "no candidate is better"
        return outcome(NOTHING_BETTER, f"{why}: {champion} stays champion")
    models = ", ".join(track["model"]["name"] for track in accepted)
    alias = "challenger" if request.as_challenger else "champion"
    if request.registry is None:  # a dry run
        return outcome(PROMOTED, f"{models}: better; in a registry {name} would be {alias}", name)
    registry = Registry(request.registry)
    aliases = registry.aliases()
    withdrawal = _withdrawal_of(registry, aliases, document, champion)
    if withdrawal and not request.as_challenger:
        sentence = f"{withdrawal.champion} was champion since {withdrawal.since} and was taken back: its data promote nothing again"
        return outcome(NOTHING_BETTER, sentence, name)
    if request.as_challenger and aliases.challenger == name:
        return outcome(NOTHING_BETTER, f"{name} is challenger already", name)
    if request.is_dry_run:
        return outcome(
            PROMOTED,
            f"{models}: better; a dry run changes nothing, else {name} would be {alias}",
            name,
        )
    hashes = []
    for track in accepted:
        folder = request.work / track["folder"]
        if load_bundle(folder).sha256 != track["bundle"]:
            raise RegistryError(
                f"{folder}: another bundle than the one that was judged: delete the folder and run it again"
            )
        hashes.append(registry.add_bundle(folder).sha256)
    try:
        release = registry.release(name)
        if not set(hashes) <= set(release.bundles):
            raise RegistryError(
                f"the release {name} in {request.registry} holds other bundles than were judged"
            )
    except UnknownReleaseError:
        registry.create_release(
            name,
            hashes,
            parent=champion,
            lineage=lineage(document),
            note=f"retrained: {models}"[:200],
        )
    reason = "; ".join(
        f"{track['model']['name']}: {', '.join(track['reasons'])}" for track in accepted
    )[:900]
    if request.as_challenger:
        registry.set_challenger(name)
    else:
        registry.set_champion(name, by=MADE_BY, reason=reason, instead_of=champion)
    return outcome(PROMOTED, f"{name} is {alias}: {models}", name)


def _withdrawal_of(
    registry: Registry, aliases: Aliases, document: dict[str, Any], champion: str
) -> Change | None:
    """When a release of the same data, made under this champion, was champion itself, by whatever
    code it was made."""
    for change in reversed(aliases.history):
        if change.champion == document["release"]:
            return change
        try:
            release = registry.release(change.champion)
        except UnknownReleaseError:  # pruned
            continue
        if (
            release.parent == champion
            and release.lineage.get("made_by") == MADE_BY
            and _inputs_of(release.lineage) == _inputs_of(document)
        ):
            return change
    return None


def _inputs_of(document: Mapping[str, Any]) -> list[Any]:
    """The inputs of a retraining without the code: files and options."""
    files = sorted(file["sha256"] for file in document["files"])
    return [files, *(document.get(name) for name in ("seed", "epochs", "encoders", "plans"))]


def lineage(document: dict[str, Any]) -> dict[str, Any]:
    """The lineage of a release: data, code, seed, and the figures that the gate accepted."""
    return {
        "made_by": MADE_BY,
        **{
            name: document[name]
            for name in (
                "run",
                "champion",
                "seed",
                "epochs",
                "encoders",
                "plans",
                "code",
                "rule",
                "files",
                "refused",
            )
        },
        "tracks": [
            {
                name: track.get(name)
                for name in (
                    "track",
                    "encoder",
                    "bundle",
                    "rows",
                    "promote",
                    "reasons",
                    "retraining",
                    "verdict",
                )
            }
            for track in document["tracks"]
        ],
    }
