"""Puts accepted models into the registry: bundles, release with its lineage, alias.

The release's name comes from the hash of the run, so a run that was killed between two of these
steps finds what it made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import Document
from gpumemnet.errors import RegistryError, UnknownReleaseError
from gpumemnet.predict.bundle_card import ENCODERS
from gpumemnet.site.releases import Aliases, Change, Registry

MADE_BY = "models retrain"


def put_into_service(request: Request, document: Document, report: Path, champion: str) -> Outcome:
    """Change the registry as the report and the request say.

    Raises:
        RegistryError: when the registry cannot be written to, or another has changed the champion
            meanwhile.
        BundleError: when a candidate was altered or removed since it was trained.
    """
    name = document["release"]
    outcome = partial(Outcome, report, document)
    if not document["promote"]:
        why = "no candidate is better" if document["is_trained"] else document["reasons"][0]
        return outcome(NOTHING_BETTER, f"{why}: {champion} stays champion")
    candidates = document["candidates"]
    models = ", ".join(candidate["name"] for candidate in candidates)
    place = "champion" if request.promotes else "a release for a person to promote"
    if request.registry is None:  # a dry run
        return outcome(PROMOTED, f"{models}: better; in a registry {name} would be {place}", name)
    registry = Registry(request.registry)
    aliases = registry.aliases()
    withdrawal = _withdrawal_of(registry, aliases, document, champion)
    if withdrawal and request.promotes:
        sentence = f"{withdrawal.champion} was champion since {withdrawal.since} and was taken back: its data promote nothing again"
        return outcome(NOTHING_BETTER, sentence, name)
    is_made = name in (release.name for release in registry.releases())
    if is_made and not request.promotes:
        return outcome(NOTHING_BETTER, f"{name} waits to be promoted already", name)
    if request.is_dry_run:
        return outcome(
            PROMOTED,
            f"{models}: better; a dry run changes nothing, else {name} would be {place}",
            name,
        )
    folders = [request.work / candidate["folder"] for candidate in candidates]
    hashes = {candidate["bundle"] for candidate in candidates}
    try:
        if not hashes <= set(registry.release(name).bundles):
            raise RegistryError(
                f"the release {name} in {request.registry} holds other bundles than were judged"
            )
    except UnknownReleaseError:
        registry.create_release(
            name,
            folders,
            parent=champion,
            lineage=lineage(document),
            note=f"retrained: {models}"[:200],
        )
    reason = "; ".join(document["reasons"])[:900]
    if request.promotes:
        registry.set_champion(name, by=MADE_BY, reason=reason, instead_of=champion)
    return outcome(PROMOTED, f"{name} is {place}: {models}", name)


def _withdrawal_of(
    registry: Registry, aliases: Aliases, document: Document, champion: str
) -> Change | None:
    """When a release of the same data, made under this champion, was champion itself, by whatever
    code it was made."""
    for change in reversed(aliases.history):
        if change.champion == document["release"]:
            return change
        try:
            release = registry.release(change.champion)
        except UnknownReleaseError:  # deleted by hand
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
    return [files, *(document.get(name) for name in ("seed", "epochs", "encoders"))]


def lineage(document: Document) -> Document:
    """The lineage of a release: data, code, seed, and the figures that the gate accepted."""
    return {
        "made_by": MADE_BY,
        **{
            name: document[name]
            for name in (
                *("run", "champion", "seed", "epochs", "encoders", "code", "rule", "files"),
                *("refused", "rows", "candidates", "reasons", "parts"),
            )
        },
    }


PROMOTED: Final = 0
FAILED: Final = 1
NOTHING_BETTER: Final = 10
"""Exit codes; 2 is the user's error, as everywhere."""


class RetrainingError(Exception):
    """A failure that no input caused, in one sentence; the champion is unchanged."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One retraining.

    Attributes:
        datasets, observations: files to learn from, in this order.
        registry: the registry's folder; ``None`` only for a dry run against the shipped bundles.
        work: folder of the steps' results and of the reports.
        encoders: which classifiers to train; the champion keeps the other.
        seed, epochs: of the plans; their own epochs unless given.
        is_dry_run: whether the registry is left alone.
        promotes: whether what is better becomes champion.
    """

    datasets: tuple[Path, ...]
    observations: tuple[Path, ...]
    registry: Path | None
    work: Path
    encoders: tuple[str, ...] = ENCODERS
    seed: int = 0
    epochs: int | None = None
    is_dry_run: bool = False
    promotes: bool = True


@dataclass(frozen=True)
class Outcome:
    """The result of a retraining.

    Attributes:
        report: its report, a JSON file.
        document: the report.
        exit_code: of the command.
        sentence: for people.
        release: the release that was made, or would have been.
    """

    report: Path
    document: Document
    exit_code: int
    sentence: str
    release: str | None = None
