"""A registry of bundles in a folder: the models, the release that answers, and the earlier ones.

::

    bundles/<sha256>/        model.onnx, card.json, SHA256SUMS: named by their content and never
    changed releases/<release>.json  the bundles that answer together, and where they come from
    aliases.json             which release is the champion, and the champions so far

A *release* is the unit that is put into service: one bundle for each encoder.  The release
``shipped`` is the bundles of the package; it is always there and has no files.  The champion is an
alias, as in MLflow's registry. Writers hold a lock and replace whole files, so that a reader needs
no lock and a killed writer leaves nothing that can be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import (
    Document,
    from_json,
    json_bytes,
    locked,
    read_file,
    remove_staging,
    replace_file,
    sync_folder,
)
from gpumemnet.errors import RegistryBusyError, RegistryError, UnknownReleaseError
from gpumemnet.job.layers import describe
from gpumemnet.predict.bundle import (
    MAX_FILE_BYTES,
    Bundle,
    load_bundle,
    shipped_bundles,
    write_bundle,
)

FORMAT: Final = 1
SHIPPED: Final = "shipped"
ALIASES_FILE: Final = "aliases.json"
LOCK_SECONDS: Final = 30.0
MAX_HISTORY: Final = 1000
"""Number of past champions in the history."""

NAME_RULE: Final = "use up to 64 lower-case letters, digits, dots, dashes and underscores, beginning with a letter or a digit"

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Release:
    """The bundles that answer together.

    Attributes:
        name: its name, which no other release has or will have.
        bundles: SHA-256 of each bundle, as :attr:`gpumemnet.predict.bundle.Bundle.sha256`.
        created: when, in ISO 8601; ``None`` for the shipped one.
        parent: the release that it was made from; ``None`` where it was made from none.
        lineage: what made it, as its maker says: hashes of data, version of code, seeds.
        note: a sentence for people.
    """

    name: str
    bundles: tuple[str, ...]
    created: str | None
    parent: str | None
    lineage: Mapping[str, Any]
    note: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the champion: to which release, when (ISO 8601), by whom, why, and whether it
    went back to an older one."""

    champion: str
    since: str
    by: str
    reason: str
    is_rollback: bool = False


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """The champion, and every champion so far, the oldest first."""

    champion: str = SHIPPED
    history: tuple[Change, ...] = ()

    @property
    def previous(self) -> str | None:
        """The release that a rollback goes back to: the champion before this one, past those that
        were themselves undone."""
        champions: list[str] = []
        for change in self.history:
            if change.is_rollback:
                del champions[-1:]
            if not champions or champions[-1] != change.champion:
                champions.append(change.champion)
        return champions[-2] if len(champions) > 1 else None


class Registry:
    """The registry in ``folder``, which need not exist before something is written to it.

    Every method that writes waits for another writer, and raises :class:`RegistryBusyError` when
    that takes too long.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def aliases_file(self) -> Path:
        """The file that changes whenever the champion changes."""
        return self.folder / ALIASES_FILE

    # reading

    def aliases(self) -> Aliases:
        """The champion and those before it; the shipped release is champion until another is chosen.

        Raises:
            RegistryError: when the file is damaged.
        """
        document = _read(self.aliases_file)
        if document is None:
            return Aliases()
        try:
            return Aliases(
                champion=_checked_name(document["champion"]),
                history=tuple(Change(**change) for change in document["history"]),
            )
        except (KeyError, TypeError, RegistryError):
            raise RegistryError(
                f"{self.aliases_file}: damaged: it must name a champion and a history"
            ) from None

    def releases(self) -> tuple[Release, ...]:
        """Every release, the shipped one first, then by age.

        Raises:
            RegistryError: when one is damaged.
        """
        files = (self.folder / "releases").glob("[!.]*.json")
        found = [self.release(path.stem) for path in files]
        return self.release(SHIPPED), *sorted(found, key=lambda one: (one.created or "", one.name))

    def release(self, name: str) -> Release:
        """The release called ``name``; its bundles are not looked at.

        Raises:
            UnknownReleaseError: when there is none.
            RegistryError: when the name is none or the file is damaged.
        """
        if _checked_name(name) == SHIPPED:
            hashes = tuple(bundle.sha256 for bundle in shipped_bundles())
            note = "the bundles of the package"
            return Release(
                name=SHIPPED, bundles=hashes, created=None, parent=None, lineage={}, note=note
            )
        path = self._release_file(name)
        document = _read(path)
        if document is None:
            raise UnknownReleaseError(f"there is no release {name!r} in the registry {self.folder}")
        try:
            found: Release = from_json(Release, document)
            is_whole = found.name == name and isinstance(found.created, str) and found.bundles
            if is_whole and all(_SHA256.fullmatch(sha256) for sha256 in found.bundles):
                return found
        except TypeError:
            pass
        raise RegistryError(
            f"{path}: damaged: it must say its name, its bundles, when and from what it was made"
        )

    def load(self, name: str) -> tuple[Bundle, ...]:
        """The bundles of the release ``name``, checked against their checksums and their names.

        Raises:
            UnknownReleaseError: when there is no such release.
            BundleError: when one of the bundles is missing, altered or from another version.
        """
        if name == SHIPPED:
            return shipped_bundles()
        return tuple(self._load_bundle(sha256) for sha256 in self.release(name).bundles)

    # writing

    def create_release(
        self,
        name: str,
        folders: Iterable[str | Path],
        *,
        parent: str | None = SHIPPED,
        lineage: Mapping[str, Any] | None = None,
        note: str = "",
    ) -> Release:
        """Make a release of the bundles of ``parent``, in which those in ``folders`` take the place
        of those with the same encoder; without a parent, of these alone.

        All bundles are copied into the registry, the shipped ones that it keeps, too: it answers
        the same after the package is upgraded.

        Raises:
            UnknownReleaseError: when there is no ``parent``.
            BundleError: when a folder is not a complete bundle, or the bundles cannot answer
                together.
            RegistryError: when the name is none or taken, or the registry cannot be written.
        """
        from gpumemnet.predict.predictor import Predictor  # loads onnxruntime

        if _checked_name(name) == SHIPPED:
            raise RegistryError(
                f"the name {SHIPPED!r} belongs to the bundles of the package: choose another"
            )
        with self._writing():
            path = self._release_file(name)
            if path.exists():
                raise RegistryError(
                    f"there is a release {name!r} already, and releases do not change: choose another name"
                )
            kept = () if parent is None else self.load(parent)
            added = [load_bundle(folder) for folder in folders]
            if not added:
                raise RegistryError(
                    f"the release {name!r} would be the same as {parent!r}: name at least one bundle"
                )
            if len({bundle.card.encoder for bundle in added}) < len(added):
                raise RegistryError(
                    f"two bundles of the release {name!r} have the same encoder: name one of them"
                )
            chosen = {bundle.card.encoder: bundle for bundle in (*kept, *added)}
            Predictor(chosen.values())
            release = Release(
                name=name,
                bundles=tuple(self._add(bundle).sha256 for bundle in chosen.values()),
                created=_now(),
                parent=parent,
                lineage=dict(lineage or {}),
                note=note,
            )
            path.parent.mkdir(exist_ok=True)
            replace_file(path, _document(asdict(release)))
            sync_folder(self.folder)
            return release

    def set_champion(
        self, name: str, *, by: str, reason: str, instead_of: str | None = None
    ) -> Aliases:
        """Make the release ``name`` champion.

        Args:
            name: the release.
            by, reason: for the history.
            instead_of: the champion that the decision was about: while another one is champion,
                nothing changes.

        Raises:
            UnknownReleaseError: when there is no such release.
            RegistryError: when another than ``instead_of`` is champion.
            BundleError: when one of its bundles is missing or altered.
        """
        with self._writing():
            self.load(name)
            aliases = self.aliases()
            if instead_of is not None and aliases.champion not in (instead_of, name):
                raise RegistryError(
                    f"{aliases.champion!r} has become champion in place of {instead_of!r} meanwhile: try again"
                )
            return aliases if aliases.champion == name else self._appoint(aliases, name, by, reason)

    def rollback(self, *, by: str, reason: str) -> Aliases:
        """Make the previous champion champion again.

        Raises:
            RegistryError: when there was none before.
            BundleError: when one of its bundles is missing or altered.
        """
        with self._writing():
            aliases = self.aliases()
            if aliases.previous is None:
                raise RegistryError(
                    f"there was no champion before {aliases.champion!r}: name a release to go to"
                )
            self.load(aliases.previous)
            return self._appoint(aliases, aliases.previous, by, reason, is_rollback=True)

    def _appoint(
        self, aliases: Aliases, name: str, by: str, reason: str, *, is_rollback: bool = False
    ) -> Aliases:
        history = aliases.history or (
            Change(champion=SHIPPED, since=_now(), by="", reason="the bundles of the package"),
        )
        change = Change(champion=name, since=_now(), by=by, reason=reason, is_rollback=is_rollback)
        made = Aliases(champion=name, history=(*history, change)[-MAX_HISTORY:])
        replace_file(self.aliases_file, _document(asdict(made)))
        return made

    def _add(self, bundle: Bundle) -> Bundle:
        folder = self._bundle_folder(bundle.sha256)
        if not folder.exists():
            write_bundle(folder, bundle.files)
            for file in folder.iterdir():
                file.chmod(0o444)
            sync_folder(self.folder)
        return self._load_bundle(bundle.sha256)

    def _load_bundle(self, sha256: str) -> Bundle:
        folder = self._bundle_folder(sha256)
        if not folder.is_dir():
            raise RegistryError(
                f"there is no bundle {sha256} in the registry {self.folder}: it was removed"
            )
        bundle = load_bundle(folder)
        if bundle.sha256 != sha256:
            raise RegistryError(f"{folder}: holds the bundle {bundle.sha256}: it was altered")
        return bundle

    def _bundle_folder(self, sha256: str) -> Path:
        return self.folder / "bundles" / sha256

    def _release_file(self, name: str) -> Path:
        return self.folder / "releases" / f"{name}.json"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the registry's lock; whatever lies in staging then is a killed writer's."""
        busy = f"the registry {self.folder} is being written to by another process: try again"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / ".lock", LOCK_SECONDS, RegistryBusyError(busy)):
                remove_staging(self.folder, self.folder / "bundles", self.folder / "releases")
                yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise RegistryError(
                f"the registry {self.folder} cannot be written to: {error.strerror}{where}"
            ) from None


def existing_registry(folder: str | Path) -> Registry:
    """The registry in ``folder``, for whoever means one that is there.

    Raises:
        RegistryError: when there is none: the folder's name may be misspelt.
    """
    registry = Registry(folder)
    if not any((registry.folder / name).exists() for name in (ALIASES_FILE, "releases", "bundles")):
        raise RegistryError(
            f"there is no registry in {folder}: check the path; 'gpumemnet releases add' makes one"
        )
    return registry


def release_digest(bundles: Collection[Bundle]) -> str:
    """SHA-256 over the bundles, whatever their order: the same for the same models, under whatever
    name."""
    import hashlib

    return hashlib.sha256(
        "\n".join(sorted(bundle.sha256 for bundle in bundles)).encode()
    ).hexdigest()


def _read(path: Path) -> Document | None:
    """The content of a file of the registry; ``None`` if there is no such file."""
    try:
        document = json.loads(read_file(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise RegistryError(f"{path}: no valid JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RegistryError(
            f"{path}: no file of a registry of format {FORMAT}: upgrade gpumemnet, or restore the file"
        )
    return document


def _document(content: Mapping[str, Any]) -> bytes:
    try:
        return json_bytes({"format": FORMAT, **content})
    except (TypeError, ValueError) as error:
        raise RegistryError(f"what is said of it is no JSON object in UTF-8 ({error})") from None


def _checked_name(name: Any) -> str:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise RegistryError(f"{describe(name)} cannot be the name of a release: {NAME_RULE}")
    return str(name)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
