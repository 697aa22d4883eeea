"""The served release: loads its bundles, tests them, and follows the registry without dropping a
request.

The new release is loaded, tested, and swapped in by one assignment.  A request reads
:attr:`ServedRelease.api` once and keeps the result, so no request sees two releases, and none waits
for a swap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client import Counter, Gauge

from gpumemnet.errors import BundleError, InvalidRequestError, RegistryError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.predict.bundle import Bundle, load_bundles
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.predict.predictor import BundleModel, ModelGpu, Predictor
from gpumemnet.site.releases import SHIPPED, Aliases, Registry, release_digest
from gpumemnet.units import MIB

from .api.examples import EXAMPLE_JOBS
from .api.predictions import PredictionApi, Recorder

FOLLOW_SECONDS: Final = 1.0
"""Time between two looks at the registry."""
RETRY_LOOKS: Final = 30
"""After this number of looks a champion that failed is tried again: its files may be back."""
CONFIGURED: Final = "configured"
"""The release's name when the settings name bundle folders."""

# With several workers, a gauge is the number of live workers for which it holds.
MODEL_INFO: Final = Gauge(
    "gpumemnet_model_info",
    "Workers that serve the release; sha256 is a shortened hash over its bundles.",
    ("release", "sha256"),
    multiprocess_mode="livesum",
)
STALE: Final = Gauge(
    "gpumemnet_champion_stale",
    "Workers that do not serve the registry's champion: it cannot be read, loaded, or failed its self-test.",
    multiprocess_mode="livesum",
)
SWAPS: Final = Counter("gpumemnet_champion_swaps", "Changes of the release that a worker serves.")
FAILED_LOADS: Final = Counter(
    "gpumemnet_release_load_failures",
    "Releases that could not be loaded or failed their self-test.",
)

logger = logging.getLogger("gpumemnet.service")


class ServedRelease:
    """The release that this process serves, and how it is replaced.

    Args:
        recorder: receives every prediction; ``None`` records nothing.
        registry: names the champion; without one, ``bundles`` or else the shipped bundles are
            served.
        bundles: folders of bundles to serve instead of a registry.
        predictor_settings: keyword arguments of every predictor: default GPU and CUDA context.

    Attributes:
        api: the current api; read it once for each request.
        failure: a sentence that says why the registry's champion is not served; ``None`` when it is
            served.

    Raises:
        BundleError: when nothing can be served: the bundles of the settings, or the shipped ones,
            fail.
    """

    api: PredictionApi

    def __init__(
        self,
        *,
        recorder: Recorder | None = None,
        registry: Registry | None = None,
        bundles: Sequence[Path] = (),
        predictor_settings: Mapping[str, Any] | None = None,
    ) -> None:
        if registry is not None and bundles:
            raise BundleError(
                "both bundles and a registry are set: set only one of GPUMEMNET_BUNDLES and GPUMEMNET_REGISTRY"
            )
        self.registry = registry
        self.failure: str | None = None
        self._aliases = Aliases()
        self._looks = 0
        self._recorder = recorder
        self._predictor_settings = dict(predictor_settings or {})
        if registry is not None:
            self._begin(registry)
        else:
            self._put(CONFIGURED if bundles else SHIPPED, self._tested(load_bundles(*bundles)))

    def follow(self) -> None:
        """Serve the release that the registry's aliases name.

        A champion that cannot be loaded or fails its self-test is reported, and the current release
        stays.  It is tried again when the aliases change, and every :data:`RETRY_LOOKS` calls.
        """
        self._looks += 1
        try:
            aliases = self._read_aliases()
            is_same, self._aliases = aliases == self._aliases, aliases
            is_served = aliases.champion == self.api.release
            if is_same and self._looks % RETRY_LOOKS:
                if is_served:
                    self._report(None)
                return
            if not is_served:
                self._swap(aliases.champion)
            self._report(None)
        except BundleError as error:
            self._report(str(error))

    def _read_aliases(self) -> Aliases:
        assert self.registry is not None
        if not self.registry.aliases_file.exists():
            raise RegistryError(f"{self.registry.aliases_file}: does not exist any more")
        return self.registry.aliases()

    def _begin(self, registry: Registry) -> None:
        """Serve the champion; if it fails, the previous champion; if that fails, the shipped
        bundles."""
        candidates = [SHIPPED]
        try:
            if not registry.folder.is_dir():
                logger.warning(
                    "the registry %s does not exist yet: %s is served until it names a champion",
                    registry.folder,
                    SHIPPED,
                )
            self._aliases = registry.aliases()
            candidates = [self._aliases.champion, *filter(None, [self._aliases.previous]), SHIPPED]
        except RegistryError as error:
            self.failure = str(error)
        for release in dict.fromkeys(candidates):
            try:
                self._put(release, self._load(release))
                break
            except BundleError as error:
                if release == SHIPPED:
                    raise
                self.failure = self.failure or str(error)
        failure, self.failure = self.failure, None
        self._report(failure)

    def _swap(self, release: str) -> None:
        predictor, before = self._load(release), self.api
        self._put(release, predictor)
        _info(before).set(0)
        SWAPS.inc()
        logger.info("release %s is served now, after %s", release, before.release)

    def _put(self, release: str, predictor: Predictor) -> None:
        self.api = PredictionApi(predictor, self._recorder, release)
        _info(self.api).set(1)

    def _load(self, release: str) -> Predictor:
        assert self.registry is not None
        try:
            return self._tested(self.registry.load(release))
        except BundleError:
            FAILED_LOADS.inc()
            raise

    def _report(self, failure: str | None) -> None:
        """Note why the champion is not served; logs what is new."""
        if failure is not None and failure != self.failure:
            logger.error(
                "the registry's champion cannot be served, %s is served instead: %s",
                self.api.release,
                failure,
            )
        self.failure = failure
        STALE.set(failure is not None)

    def _tested(self, bundles: Sequence[Bundle]) -> Predictor:
        try:
            predictor = Predictor(bundles, **self._predictor_settings)
        except InvalidRequestError as error:
            raise BundleError(
                f"the settings GPUMEMNET_GPU and GPUMEMNET_CONTEXT_MIB do not do: {error}"
            ) from None
        check_golden(predictor)
        return predictor


def _info(api: PredictionApi) -> Gauge:
    return MODEL_INFO.labels(api.release, release_digest(api.predictor.bundles)[:12])


# The self-test.  A graph may load and run, and still be useless: trained on other units, exported with
# swapped columns, or trained too briefly.  The rules hold for every usable model.  Whether one model
# is better than another is measured on observations, by the gate of a retraining.

PLAUSIBLE_FACTOR: Final = 4.0
"""Greatest factor, up or down, between a predicted peak and the job's computed memory.
The computed memory is the sum of weights, gradients, optimizer state and layer outputs.
The shipped models lie between 0.8 and 1.7 times it.
"""

_SLACK_BYTES: Final = 64 * MIB
"""Added on both sides of that comparison: a small job takes segments that no list shows."""
_PHYSICAL_COLUMNS: Final = [
    FEATURE_NAMES.index(name)
    for name in (
        "weight_bytes",
        "gradient_bytes",
        "optimizer_state_bytes",
        "input_bytes",
        "activation_bytes",
    )
]


def check_golden(predictor: Predictor) -> None:
    """Let every model of ``predictor`` predict golden jobs.

    Args:
        predictor: to test.

    Raises:
        BundleError: names the bundle, the job and the fault.
    """
    for bundle in predictor.bundles:
        model = predictor.model(bundle.card.encoder)
        model_gpu = model.model_gpu(predictor.prediction_gpu(None))
        for family in bundle.card.families:
            _check(model, model_gpu, family)


def _check(model: BundleModel, model_gpu: ModelGpu, family: str) -> None:
    described = {"layers": JobTable.from_jobs((job_from_dict(EXAMPLE_JOBS[family]),))}
    if not model.needs_layers:
        described["totals"] = described["layers"].without_layers()
    for name, table in described.items():
        try:
            problem = _problem(model, model_gpu, table)
        except Exception as error:  # onnxruntime and numpy may raise any exception
            problem = f"is not answered ({type(error).__name__}: {error})"
        if problem:
            raise BundleError(
                f"the self-test of {model.card.name} (bundle {model.bundle.sha256[:12]}) failed: "
                f"the {family} job with {name} {problem}"
            )


def _problem(model: BundleModel, model_gpu: ModelGpu, table: JobTable) -> str | None:
    features = model.features(table, model_gpu)
    answer = model.run(table, features)
    amounts = (answer.expected_bytes, answer.bounds_bytes)
    if answer.is_broken.any() or not all(np.isfinite(part).all() for part in amounts):
        return "gets numbers that are not finite"
    estimates = [model.predict(table, None, each, model_gpu)[0] for each in model.card.coverages]
    limits = [estimate.safe_bytes for estimate in estimates if estimate.safe_bytes is not None]
    if limits != sorted(limits):
        return "gets safe bytes that do not rise with the coverage"
    # the context is the same on both sides, and would hide an amount of nothing
    computed_bytes = float(_SLACK_BYTES + features[0, _PHYSICAL_COLUMNS].sum())
    ratio = float(_SLACK_BYTES + answer.expected_bytes[0]) / computed_bytes
    if not 1 / PLAUSIBLE_FACTOR <= ratio <= PLAUSIBLE_FACTOR:
        return (
            f"gets {estimates[0].expected_bytes:,} expected bytes, {ratio:.3g} times of what "
            "tensors take"
        )
    return None
