"""The card of a bundle: identity of the model, its training data, support, and calibration; read
from JSON and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jiter
import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import BundleError
from gpumemnet.job.training_job import FAMILIES, NUMBER_FIELDS, OPTION_FIELDS
from gpumemnet.predict.features import FEATURE_NAMES, FEATURE_SCHEMA
from gpumemnet.units import MIB

FORMAT_VERSION: Final = 3
ALL_FAMILIES: Final = "all"
"""Value of :attr:`BundleCard.family` where a model predicts several families."""
ENCODERS: Final = ("mlp", "transformer")

OptionValue = str | bool | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPeakCalibration:
    """Distribution of measured memory around the traced peak plus the CUDA context, for jobs that
    state a traced peak.

    Attributes:
        weights, log_scales: mixture of logistics around ``log(traced peak + context)``.
        log_shift: centre of the mixture, relative to that logarithm.
        log_bounds: upper bound for each coverage of the card, relative to that logarithm.
        options: job field → values among the calibration jobs.
    """

    weights: tuple[float, ...]
    log_scales: tuple[float, ...]
    log_shift: float
    log_bounds: tuple[float, ...]
    options: Mapping[str, tuple[OptionValue, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleCard:
    """The parsed card of a bundle.

    Attributes:
        name, version: identity of the model.
        families: the job families that the model predicts.
        encoder: the model's input: ``mlp`` (feature vector) or ``transformer`` (feature vector and
            layer sequence).
        label_source: origin of the training labels.
        gpu: the GPU model that answers are for where none is asked for.
        contexts: GPU model → CUDA context that training rows of the site measured on it.
        traced_peaks: job family → calibration for jobs that state a traced peak.
        options: job field → values seen in training; any other value is outside the support.
        kinds: layer kinds seen in training; any other kind is outside the support.
        ranges: feature column → smallest and largest value seen in training.
        other_share: largest share of output elements that belonged to layers of kind ``other``,
            whose memory is unknown.
        coverages: the calibrated coverages of the graph's bounds, increasing.
        widenings: for each coverage, the logarithm of the factor by which the bound widens outside
            the support.
        document: the whole card as written.
        site_calibration: a site's calibration for its GPU; ``None`` in shipped bundles.
    """

    name: str
    version: str
    families: tuple[str, ...]
    encoder: str
    label_source: str
    gpu: str
    contexts: Mapping[str, int]
    traced_peaks: Mapping[str, TracedPeakCalibration]
    options: Mapping[str, tuple[OptionValue, ...]]
    kinds: frozenset[str]
    ranges: Mapping[str, tuple[float, float]]
    other_share: float
    coverages: tuple[float, ...]
    widenings: tuple[float, ...]
    document: Mapping[str, Any]
    site_calibration: SiteCalibration | None = None

    @property
    def family(self) -> str:
        """The job family that the model predicts, or ``all`` where there are several."""
        return self.families[0] if len(self.families) == 1 else ALL_FAMILIES

    @property
    def provenance(self) -> str | None:
        """How the labels of the training data came about; ``None`` where the card does not say."""
        stated: str | None = self.document["training_data"].get("provenance")
        return stated


def parse_card(content: bytes, path: Path) -> BundleCard:
    """Reads and checks a card.

    Args:
        content: the file ``card.json``.
        path: its path, for messages.

    Raises:
        BundleError: when the card is damaged, incomplete, or of another version.
    """
    try:
        jiter.from_json(content)  # refuses half of a surrogate pair, and what is nested too deeply
        document = json.loads(content, parse_int=_portable)
    except ValueError as error:
        raise BundleError(f"{path}: no JSON that every library can read: {error}") from None
    if not isinstance(document, dict) or "format_version" not in document:
        raise BundleError(f"{path}: no card of a gpumemnet bundle")
    if document["format_version"] != FORMAT_VERSION:
        raise BundleError(
            f"{path}: bundle format {document['format_version']}, and this version of gpumemnet reads {FORMAT_VERSION}: "
            "upgrade gpumemnet or export the bundle again"
        )
    if document.get("feature_schema") != FEATURE_SCHEMA:
        raise BundleError(
            f"{path}: made for feature schema {document.get('feature_schema')}, and this version computes {FEATURE_SCHEMA}: "
            "train the bundle again"
        )
    try:
        card = _card(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{path}: incomplete card ({type(error).__name__}: {error})") from None
    unfamiliar = sorted({*card.families} - {*FAMILIES})
    if unfamiliar or not card.families:
        raise BundleError(f"{path}: unknown family {', '.join(unfamiliar)!r}")
    if card.encoder not in ENCODERS:
        raise BundleError(f"{path}: unknown encoder {card.encoder!r}: upgrade gpumemnet")
    unknown = sorted({*card.ranges} - {*FEATURE_NAMES})
    if unknown:
        raise BundleError(f"{path}: unknown feature column {unknown[0]!r} in the support")
    return card


def _card(document: Mapping[str, Any]) -> BundleCard:
    support, bounds = document["support"], document["conformal"]
    coverages = _coverages(bounds["coverages"])
    widenings = tuple(map(_number, bounds["widenings"]))
    if len(widenings) != len(coverages) or min(widenings) < 0:
        raise ValueError("the bounds need a widening of at least 0 for each coverage")
    return BundleCard(
        name=_text(document, "name"),
        version=_text(document, "version"),
        families=tuple(_texts(document["families"])),
        encoder=_text(document, "encoder"),
        label_source=_text(document["training_data"], "label_source"),
        gpu=_text(document, "gpu"),
        contexts={
            gpu: _whole(amount, 0, MAX_SHIFT_BYTES) for gpu, amount in document["contexts"].items()
        },
        traced_peaks={
            family: _traced_peak(part, len(coverages))
            for family, part in document["traced_peaks"].items()
        },
        options=_options(support["options"]),
        kinds=frozenset(_texts(support["kinds"])),
        ranges=_ranges(support["ranges"]),
        other_share=_number(support["other_share"]),
        coverages=coverages,
        widenings=widenings,
        document=document,
        site_calibration=site_calibration_from_card(
            document.get("site_calibration"), len(coverages)
        ),
    )


def _portable(digits: str) -> int:
    """A whole number that every JSON library can write: the service's list of models contains the
    whole card."""
    return _whole(int(digits), -(2**63), 2**63 - 1)


def _traced_peak(document: Any, levels: int) -> TracedPeakCalibration:
    weights, log_scales, log_bounds = (
        tuple(map(_number, document[name])) for name in ("weights", "log_scales", "log_bounds")
    )
    if (
        not 0 < len(weights) == len(log_scales)
        or min(weights + log_scales) <= 0
        or abs(sum(weights) - 1.0) > 1e-6
        or len(log_bounds) != levels
    ):
        raise ValueError(
            "the calibration of the traced peak needs weights that sum to one, scales above zero, and a bound for each coverage"
        )
    return TracedPeakCalibration(
        weights=weights,
        log_scales=log_scales,
        log_shift=_number(document["log_shift"]),
        log_bounds=log_bounds,
        options=_options(document["options"]),
    )


def _coverages(levels: Any) -> tuple[float, ...]:
    coverages = tuple(map(_number, levels))
    if (
        not coverages
        or coverages != tuple(sorted(set(coverages)))
        or not 0.0 < coverages[0] <= coverages[-1] < 1.0
    ):
        raise ValueError("the coverages must rise between 0 and 1")
    return coverages


def _options(options: Any) -> dict[str, tuple[OptionValue, ...]]:
    seen = {field: tuple(values) for field, values in options.items() if isinstance(values, list)}
    if (
        not seen
        or seen.keys() != options.keys()
        or not seen.keys() <= {*OPTION_FIELDS, *NUMBER_FIELDS}
    ):
        raise ValueError("the support's options must be lists of values of job fields")
    if not all(
        value is None or isinstance(value, str | bool | int)
        for values in seen.values()
        for value in values
    ):
        raise ValueError("the support's options must be plain values")
    return seen


def _ranges(document: Any) -> dict[str, tuple[float, float]]:
    return {column: (_number(low), _number(high)) for column, (low, high) in document.items()}


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("the support's kinds must be a list of texts")
    return values


def _whole(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is no whole number from {least} to {most}")
    return value


def _text(document: Mapping[str, Any], field: str) -> str:
    value = document[field]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


Array = NDArray[np.float64]

UNIT_COVERAGES: Final = (0.5, 0.9)
"""The difference of the shipped bounds at these two coverages is a job's unit of spread."""
UNIT_FLOOR_BYTES: Final = 2 * MIB
"""Smallest unit of spread: readings are whole MiB, so a spread is uncertain by 1 MiB on each
side."""
MAX_SHIFT_BYTES: Final = 2**41


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCalibration:
    """A site's calibration of one bundle for one GPU.

    Attributes:
        gpu: name of the GPU that the calibration is for.
        shift_bytes: how much more memory the site's jobs take than the graph predicts, mostly
            another CUDA context.
        shift_bound_bytes: upper bound of the shift; equal to the shift when the multiples include
            its error.
        multiples: for each coverage of the card, the bound in units of spread above the shifted
            expectation; ``None`` when the site has too few jobs for that coverage.
        largest: the largest error of the site's jobs, in units of spread: a lower limit for the
            shipped bounds that stay in use; ``None`` when there are no multiples.
        unit_levels: positions, among the card's coverages, of the two bounds whose difference is
            the unit of spread.
        context_bytes: the CUDA context at the site; ``None`` in cards that do not state it.
    """

    gpu: str
    shift_bytes: int
    shift_bound_bytes: int
    multiples: tuple[float | None, ...]
    largest: float | None
    unit_levels: tuple[int, int]
    context_bytes: int | None = None

    def bounds(self, expected_bytes: Array, bounds_bytes: Array) -> Array:
        """The site's bounds of ``B`` jobs before the shift, shape ``[B, L]``, from the graph's
        expected bytes and bounds."""
        unit = spread_unit(bounds_bytes, self.unit_levels)
        site = bounds_bytes.copy()
        for level, multiple in enumerate(self.multiples):
            if multiple is not None:
                site[:, level] = expected_bytes + multiple * unit
            elif self.largest is not None:
                np.maximum(
                    bounds_bytes[:, level], expected_bytes + self.largest * unit, out=site[:, level]
                )
        return site


def unit_levels(coverages: Sequence[float]) -> tuple[int, int]:
    """Positions of the calibrated coverages nearest to each of :data:`UNIT_COVERAGES`."""

    def nearest(wanted: float) -> int:
        return min(range(len(coverages)), key=lambda at: abs(coverages[at] - wanted))

    low, high = map(nearest, UNIT_COVERAGES)
    return low, high


def spread_unit(bounds_bytes: Array, levels: tuple[int, int]) -> Array:
    """Each job's unit of spread in bytes, shape ``[B]``, from the shipped bounds, shape ``[B,
    L]``."""
    low, high = levels
    unit: Array = np.maximum(bounds_bytes[:, high] - bounds_bytes[:, low], UNIT_FLOOR_BYTES)
    return unit


def site_calibration_from_card(document: Any, levels: int) -> SiteCalibration | None:
    """Reads the calibration from a card; ``None`` when it has none.

    Raises:
        KeyError, TypeError, ValueError: when the entry is not a valid calibration.
    """
    if document is None:
        return None
    multiples = tuple(None if value is None else _number(value) for value in document["multiples"])
    carried = [value for value in multiples if value is not None]
    largest = None if document["largest"] is None else _number(document["largest"])
    if (
        len(multiples) != levels
        or carried != sorted(carried)
        or (carried and (largest is None or largest < carried[-1]))
    ):
        raise ValueError(
            "the site's calibration needs a multiple or null for each coverage, rising up to the largest"
        )
    if multiples[: len(carried)] != tuple(carried):
        raise ValueError("the site's calibration carries a coverage but not a smaller one")
    low, high = (_whole(level, 0, levels - 1) for level in document["unit_levels"])
    amounts = {
        name: _whole(document[name], -MAX_SHIFT_BYTES, MAX_SHIFT_BYTES)
        for name in ("shift_bytes", "shift_bound_bytes", "context_bytes")
        if name != "context_bytes" or document.get(name) is not None
    }
    if amounts["shift_bound_bytes"] < amounts["shift_bytes"]:
        raise ValueError("the site's calibration bounds the shift below the shift")
    return SiteCalibration(
        gpu=_text(document, "gpu"),
        multiples=multiples,
        largest=largest,
        unit_levels=(low, high),
        **amounts,
    )
