"""Loads the served release, and replaces it: the new release is loaded, tested, and swapped in by
one assignment.

A request reads :attr:`ServedRelease.api` once and keeps the result.  So no request sees two
releases, and none waits for a swap. The previous release stays in the registry.  A rollback loads
it again, so it costs no memory meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpumemnet.errors import BundleError, InvalidRequestError, RegistryError
from gpumemnet.predict.bundle import Bundle, load_bundles, shipped_bundles
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.releases import SHIPPED, Aliases, Registry, release_digest

from ..api.predictions import PredictionApi
from ..heap import give_memory_back
from .metrics import FAILED_LOADS, MODEL_INFO, STALE, SWAPS
from .self_test import check_golden
from .shadow import Shadow

RETRY_ROUNDS: Final = 30
"""So many looks at the registry after a failure, the champion is tried again: a folder in the
network may have come back."""

CONFIGURED: Final = "configured"
"""The release's name when the settings name bundle folders."""

logger = logging.getLogger("gpumemnet.service")

Signature = tuple[int, int, int] | None


class Loaded(NamedTuple):
    """A loaded release, ready to serve; ``sha256`` is a hash over its bundles."""

    release: str
    sha256: str
    bundles: Sequence[Bundle]
    api: PredictionApi


class ServedRelease:
    """The release that this process serves, and how it is replaced.

    Args:
        build: makes an api from a predictor and the name of its release.
        registry: names the champion; without one, ``bundles`` or else the shipped bundles are
            served.
        bundles: folders of bundles to serve instead of a registry.
        shadow: runs the challenger; without one, challengers are ignored.
        predictor_settings: keyword arguments of every predictor: default GPU and CUDA context.
        is_champion_required: whether the service is ready only while it serves the registry's
            champion.

    Attributes:
        api: the current api; read it once for each request.
        release, sha256: the name of its release, and a hash over its bundles.
        previous: the release that this process served before.
        aliases: the registry's aliases at the last read.
        failure: a sentence that says why the registry's champion is not served; ``None`` when it is
            served.
        challenger_failure: the same for the challenger.

    Raises:
        BundleError: when nothing can be served: the bundles of the settings, or the shipped ones,
            fail.
    """

    api: PredictionApi
    release: str
    sha256: str

    def __init__(
        self,
        build: Callable[[Predictor, str], PredictionApi],
        *,
        registry: Registry | None = None,
        bundles: Sequence[Path] = (),
        shadow: Shadow | None = None,
        predictor_settings: Mapping[str, Any] | None = None,
        is_champion_required: bool = False,
    ) -> None:
        if registry is not None and bundles:
            raise BundleError(
                "both bundles and a registry are set: set only one of GPUMEMNET_BUNDLES and GPUMEMNET_REGISTRY"
            )
        self.registry = registry
        self.previous: str | None = None
        self.aliases = Aliases()
        self.failure: str | None = None
        self.challenger_failure: str | None = None
        self.is_champion_required = is_champion_required
        self._rounds = 0
        self._build = build
        self._predictor_settings = dict(predictor_settings or {})
        self._shadow = shadow
        self._lock = threading.Lock()
        self._tested_sha256s: set[str] = set()
        self._seen: Signature = None
        if registry is not None:
            self._begin(registry)
        elif bundles:
            self._put(
                self._ready(
                    CONFIGURED, [bundle for folder in bundles for bundle in load_bundles(folder)]
                )
            )
        else:
            self._put(self._ready(SHIPPED, shipped_bundles()))

    @property
    def challenger(self) -> str | None:
        """The challenger's release in this process."""
        return None if self._shadow is None else self._shadow.release

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent here: not while another release answers in place of a
        champion that is required."""
        return self.failure is None or not self.is_champion_required

    @property
    def fallback(self) -> str | None:
        """The release that answers in place of the registry's champion; ``None`` while the champion
        answers."""
        return None if self.failure is None else self.release

    def follow(self) -> None:
        """Serve the release that the registry's aliases name; checks only the file's date when it
        has not changed.

        A champion that cannot be loaded or fails its self-test is reported, and the current release
        stays.  It is tried again when the aliases change, and every :data:`RETRY_ROUNDS` calls.
        """
        if self.registry is None:
            return
        self._rounds = self._rounds + 1 if self.failure is not None else 0
        is_due = self._rounds >= RETRY_ROUNDS
        if not is_due and _signature(self.registry.aliases_file) == self._seen:
            return
        self._rounds = 0
        with self._lock:
            self._follow(self.registry)

    def promote(self, release: str, *, by: str, reason: str) -> Aliases:
        """Test ``release``, make it the registry's champion, and serve it.

        Raises:
            UnknownReleaseError: when there is no such release.
            RegistryError: when there is no registry, or it cannot be written to.
            BundleError: when the release cannot be loaded or fails its self-test; nothing has
                changed then.
        """
        registry = self._registry()
        with self._lock:
            loaded = None if release == self.release else self._load_champion(release)
            self.aliases = registry.set_champion(release, by=by, reason=reason)
            self._swap(loaded)
            self._follow_challenger()
            return self.aliases

    def roll_back(self, *, by: str, reason: str) -> Aliases:
        """Test the previous champion, make it champion again, and serve it.

        Raises:
            As :meth:`promote`; RegistryError also when there was no previous champion.
        """
        registry = self._registry()
        with self._lock:
            target = registry.aliases().previous
            loaded = (
                None if target is None or target == self.release else self._load_champion(target)
            )
            self.aliases = registry.rollback(by=by, reason=reason)
            if self.aliases.champion == target:
                self._swap(loaded)
                self._follow_challenger()
            else:  # another process changed the champion meanwhile
                self._follow(registry)
            return self.aliases

    def set_challenger(self, release: str | None) -> Aliases:
        """Test ``release`` and make it the registry's challenger; ``None`` removes the challenger.

        Raises:
            As :meth:`promote`; RegistryError also when ``release`` is the champion.
        """
        registry = self._registry()
        with self._lock:
            predictor = (
                None
                if release is None or release == self.challenger
                else self._load(release, "challenger")
            )
            self.aliases = registry.set_challenger(release)
            if self._shadow is not None and release is not None and predictor is not None:
                self._shadow.challenge(release, predictor)
                self.challenger_failure = None
            self._follow_challenger()
            return self.aliases

    def take_over(self, release: str, sha256: str) -> None:
        """Serve what another process of this service serves, and has tested.

        Args:
            release: name of the release.
            sha256: hash over its bundles.

        Raises:
            BundleError: when the release cannot be loaded, or has other bundles.
        """
        with self._lock:
            if (release, sha256) == (self.release, self.sha256):
                return
            loaded = self._answering(
                release, Predictor(self._registry().load(release), **self._predictor_settings)
            )
            if loaded.sha256 != sha256:
                raise BundleError(f"the bundles of release {release} are not those that are served")
            self.api, self.release, self.sha256 = loaded.api, release, sha256

    def _registry(self) -> Registry:
        if self.registry is None:
            raise RegistryError(
                "there is no registry to choose releases from: give the service a folder in GPUMEMNET_REGISTRY"
            )
        return self.registry

    def _begin(self, registry: Registry) -> None:
        """Serve the champion; if it fails, the previous champion; if that fails, the shipped
        bundles."""
        self._seen = _signature(registry.aliases_file)
        if not registry.folder.is_dir():
            logger.warning(
                "the registry %s does not exist yet: %s is served until it names a champion",
                registry.folder,
                SHIPPED,
            )
        candidates = [SHIPPED]
        try:
            self.aliases = registry.aliases()
            candidates = [self.aliases.champion, *filter(None, [self.aliases.previous]), SHIPPED]
        except RegistryError as error:
            self._report(str(error))
        for release in dict.fromkeys(candidates):
            try:
                self._put(self._load_champion(release))
                break
            except BundleError as error:
                if release == SHIPPED:
                    raise
                self._report(self.failure or str(error))
        if self.failure:
            logger.error(
                "the registry's champion cannot be served, %s is served instead: %s",
                self.release,
                self.failure,
            )
        self._follow_challenger()

    def _follow(self, registry: Registry) -> None:
        seen = _signature(registry.aliases_file)
        try:
            if seen is None:
                raise RegistryError(f"{registry.aliases_file}: does not exist any more")
            self.aliases = registry.aliases()
            champion = self.aliases.champion
            self._swap(None if champion == self.release else self._load_champion(champion))
        except BundleError as error:
            self._report(str(error))
            logger.error(
                "the registry's champion cannot be served, %s stays: %s", self.release, error
            )
        self._seen = seen
        self._follow_challenger()

    def _swap(self, loaded: Loaded | None) -> None:
        """Serve ``loaded``; ``None`` keeps the current api."""
        self._report(None)
        if loaded is None:
            return
        before, self.previous = self.release, self.release
        MODEL_INFO.labels(self.release, self.sha256[:12]).set(0)
        self._put(loaded)
        SWAPS.inc()
        logger.info("release %s is served now, after %s", loaded.release, before)
        give_memory_back()

    def _put(self, loaded: Loaded) -> None:
        if self._shadow is not None:
            self._shadow.champion_is(loaded.bundles)
        self.api, self.release, self.sha256 = loaded.api, loaded.release, loaded.sha256
        MODEL_INFO.labels(self.release, self.sha256[:12]).set(1)

    def _follow_challenger(self) -> None:
        challenger = self.aliases.challenger
        if self._shadow is None or challenger == self.challenger:
            return
        self.challenger_failure = None
        self._shadow.withdraw()
        try:
            if challenger is not None:
                self._shadow.challenge(challenger, self._load(challenger, "challenger"))
        except BundleError as error:
            self.challenger_failure = str(error)
            logger.error("the registry's challenger cannot be used: %s", error)
        give_memory_back()

    def _load_champion(self, release: str) -> Loaded:
        predictor = self._load(release, "champion")
        return self._answering(release, predictor)

    def _load(self, release: str, alias: str) -> Predictor:
        try:
            return self._tested(self._registry().load(release))
        except BundleError:
            FAILED_LOADS.labels(alias).inc()
            raise

    def _ready(self, release: str, bundles: Sequence[Bundle]) -> Loaded:
        return self._answering(release, self._tested(bundles))

    def _answering(self, release: str, predictor: Predictor) -> Loaded:
        return Loaded(
            release,
            release_digest(predictor.bundles),
            predictor.bundles,
            self._build(predictor, release),
        )

    def _report(self, failure: str | None) -> None:
        self.failure = failure
        STALE.set(failure is not None)

    def _tested(self, bundles: Sequence[Bundle]) -> Predictor:
        try:
            predictor = Predictor(bundles, **self._predictor_settings)
        except InvalidRequestError as error:
            raise BundleError(
                f"the settings GPUMEMNET_GPU and GPUMEMNET_CONTEXT_MIB do not do: {error}"
            ) from None
        check_golden(predictor, self._tested_sha256s)
        self._tested_sha256s.update(bundle.sha256 for bundle in predictor.bundles)
        return predictor


def _signature(file: Path) -> Signature:
    """A value that changes whenever the file is replaced."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
