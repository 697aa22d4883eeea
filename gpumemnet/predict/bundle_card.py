"""The card of a bundle: identity of the model, its training data, support, and calibration.

Its values are those of who made the bundle, as those of the graph are: checksums tell altered files.
Checked is what another version or an incomplete card would get wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jiter
import numpy as np

from gpumemnet.atomic_files import Document, from_json
from gpumemnet.errors import BundleError
from gpumemnet.job.job_table import Array
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.features import FEATURE_NAMES, FEATURE_SCHEMA
from gpumemnet.units import MIB

FORMAT_VERSION: Final = 3
ALL_FAMILIES: Final = "all"
"""Value of :attr:`BundleCard.family` where a model predicts several families."""
ENCODERS: Final = ("mlp", "transformer")

OptionValue = str | bool | int | None


@dataclass(frozen=True, kw_only=True)
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
    options: Mapping[str, Sequence[OptionValue]]


@dataclass(frozen=True, kw_only=True)
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
    options: Mapping[str, Sequence[OptionValue]]
    kinds: frozenset[str]
    ranges: Mapping[str, Sequence[float]]
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
        return self.document["training_data"].get("provenance")


def parse_card(content: bytes, path: Path) -> BundleCard:
    """Reads and checks a card.

    Args:
        content: the file ``card.json``.
        path: its path, for messages.

    Raises:
        BundleError: when the card is damaged, incomplete, or of another version.
    """
    try:
        document = jiter.from_json(content)
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


def _card(document: Document) -> BundleCard:
    support = document["support"]
    return from_json(
        BundleCard,
        {
            **document,
            **support,
            **document["conformal"],
            "kinds": frozenset(support["kinds"]),
            "label_source": document["training_data"]["label_source"],
            "traced_peaks": {
                family: from_json(TracedPeakCalibration, part)
                for family, part in document["traced_peaks"].items()
            },
            "document": document,
        },
    )


UNIT_COVERAGES: Final = (0.5, 0.9)
"""The difference of the shipped bounds at these two coverages is a job's unit of spread."""
UNIT_FLOOR_BYTES: Final = 2 * MIB
"""Smallest unit of spread: readings are whole MiB, so a spread is uncertain by 1 MiB on each
side."""


@dataclass(frozen=True, kw_only=True)
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
    return np.maximum(bounds_bytes[:, high] - bounds_bytes[:, low], UNIT_FLOOR_BYTES)
