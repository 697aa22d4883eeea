"""One bundle, ready to run: from features through its graph to predictions, for jobs that it is asked about on any GPU.

Which bundle answers for a job is :mod:`gpumemnet.predict.predictor`'s affair.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, Final, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from gpumemnet.errors import BundleError, InvalidRequestError
from gpumemnet.features.sequence import SEQUENCE_COLUMNS, layer_sequence
from gpumemnet.features.vector import FEATURE_NAMES, feature_matrix
from gpumemnet.gpu.catalogue import context, device_profile
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import describe
from gpumemnet.physics.replicas import added_by_replicas
from gpumemnet.predict.bins import BinScheme, bins_of_width
from gpumemnet.predict.bundle import COMMON, GRAPH_OUTPUTS, Bundle
from gpumemnet.predict.distribution import MOST_LOG_BYTES, MemoryDistribution
from gpumemnet.predict.prediction_table import AnsweringModel, ModelAnswer, PredictionTable
from gpumemnet.predict.site_calibration import SiteCalibration
from gpumemnet.predict.support import Support, Unseen, option_reasons
from gpumemnet.units import GIB

Array = NDArray[np.floating[Any]]

_ROWS_AT_ONCE: Final = {"mlp": 256, "transformer": 32, COMMON: 256}
"""So many jobs go through a graph at once: more would fall out of the processor's cache, and take memory that stays taken."""
NO_NUMBER: Final = "the model gives no number for it"
"""The reason of a job for which a graph answers infinity or no number."""
_MOST_BYTES: Final = 2.0**62
"""However large an amount is, it stays a number of 64 bits."""


class GraphAnswer(NamedTuple):
    """What a bundle's graph says of ``B`` jobs: distributions; closed form and expected ``[B]``, bounds ``[B, L]``, in bytes.

    Where ``is_broken`` is set, the graph says nothing of the jobs ``[B]`` in it, and all amounts are the GPU's capacity.
    """

    distribution: MemoryDistribution
    reference_bytes: NDArray[np.float64]
    expected_bytes: NDArray[np.float64]
    bounds_bytes: NDArray[np.float64]
    is_broken: NDArray[np.bool_] | None


class Place(NamedTuple):
    """The GPU that a question is about, as a model needs it.

    Attributes:
        gpu: its name.
        capacity_bytes, blas_workspace_bytes: of it.
        context_bytes: its CUDA context, less the one that the model's labels hold.
        context_bound_bytes: the most that it can be, less the same.
        site: what a site has calibrated for this GPU; ``None`` for the model as it was trained.
    """

    gpu: str
    capacity_bytes: int
    blas_workspace_bytes: int
    context_bytes: int
    context_bound_bytes: int
    site: SiteCalibration | None = None


class BundleModel:
    """One bundle, ready to run for jobs of one family: its graph in onnxruntime and its support as arrays."""

    def __init__(self, bundle: Bundle, family: str | None = None, session: onnxruntime.InferenceSession | None = None) -> None:
        """For jobs of ``family``, the bundle's first unless given; ``session`` is the bundle's graph where that is loaded."""
        self.bundle = bundle
        self.card = card = bundle.card.of(family or bundle.card.families[0])
        self.needs_layers = card.encoder == "transformer"
        self.own_place = self._at_site(Place(card.gpu, card.capacity_bytes, card.blas_workspace_bytes, 0, 0))
        self.support = Support(card)
        self._default_bins = bins_of_width(GIB, card.capacity_bytes)
        self._rows_at_once = _ROWS_AT_ONCE[card.encoder]
        self._session = session or load_session(bundle)

    def place(self, gpu: str | None) -> Place:
        """The GPU called ``gpu`` beside the model's own, which it is unless named.

        Raises:
            InvalidRequestError: when there is no profile of it.
        """
        if gpu is None or gpu == self.card.gpu:
            return self.own_place
        device = device_profile(gpu)
        if device.name == self.card.gpu:
            return self.own_place
        outside, own = context(device), self.card.context_bytes
        return self._at_site(
            Place(
                device.name,
                device.capacity_bytes,
                device.blas_workspace_bytes,
                outside.expected_bytes - own,
                outside.bound_bytes - own,
            )
        )

    def _at_site(self, place: Place) -> Place:
        """The same place as a site has calibrated it, where it is the site's GPU."""
        site = self.card.site_calibration
        if site is None or site.gpu != place.gpu:
            return place
        return place._replace(context_bytes=site.shift_bytes, context_bound_bytes=site.shift_bound_bytes, site=site)

    def run(self, table: JobTable, features: NDArray[np.float64]) -> GraphAnswer:
        """The graph's answer for ``B`` jobs with their features, shape ``[B, F]``."""
        step = self._rows_at_once
        if len(features) <= step:
            weights, locations, scales, amounts = self._run(table, features)
        else:
            starts = range(0, len(features), step)
            parts = [self._run(table[at : at + step] if self.needs_layers else table, features[at : at + step]) for at in starts]
            weights, locations, scales, amounts = map(np.concatenate, zip(*parts, strict=True))
        is_broken = None
        if not _are_numbers(weights, locations, scales, amounts):
            is_number = [np.isfinite(output).all(axis=1) for output in (weights, locations, scales, amounts)]
            is_broken = ~np.logical_and.reduce(is_number)
            amounts = np.where(is_broken[:, None], math.log(self.card.capacity_bytes or 1), amounts)
        amounts_bytes = _in_bytes(amounts)
        return GraphAnswer(
            MemoryDistribution(weights, locations, scales),
            amounts_bytes[:, 0],
            amounts_bytes[:, 1],
            np.minimum(amounts_bytes[:, 2:], _MOST_BYTES),
            is_broken,
        )

    def _run(self, table: JobTable, features: NDArray[np.float64]) -> list[Any]:
        inputs: dict[str, Any] = {"features": features.astype(np.float32)}
        if self.needs_layers:
            sequences, mask = layer_sequence(table)
            inputs |= {"sequences": sequences, "mask": mask.astype(np.float32)}
        answer: list[Any] = self._session.run(GRAPH_OUTPUTS, inputs)
        return answer

    def reaches(self, coverage: float) -> bool:
        """Whether the bounds are calibrated for ``coverage``."""
        coverages = self.card.coverages
        return type(coverage) in (int, float) and coverages[0] <= coverage <= coverages[-1]

    def level(self, coverage: float) -> int:
        """Position of the smallest calibrated coverage that is at least ``coverage``.

        Raises:
            InvalidRequestError: when the coverage lies outside the calibrated ones.
        """
        coverages = self.card.coverages
        if not self.reaches(coverage):
            if isinstance(coverage, bool) or not isinstance(coverage, int | float):
                raise InvalidRequestError(f"must be a number, not {describe(coverage)}", "coverage")
            raise InvalidRequestError(
                f"must be between {coverages[0]:g} and {coverages[-1]:g}, for which {self.card.name} was calibrated, "
                f"not {describe(coverage)}",
                "coverage",
            )
        return bisect.bisect_left(coverages, coverage)

    def features(self, table: JobTable, place: Place) -> NDArray[np.float64]:
        """Feature vectors of ``B`` jobs on the GPU ``place``, shape ``[B, F]``."""
        return feature_matrix(table, place.blas_workspace_bytes)

    def predict(
        self,
        table: JobTable,
        bins: BinScheme | None,
        coverage: float,
        place: Place | None = None,
        features: NDArray[np.float64] | None = None,
        unseen: Unseen | None = None,
    ) -> PredictionTable:
        """Predictions of jobs that all belong to the bundle's family.

        Args:
            table: the jobs.
            bins: bin scheme of the probabilities; 1 GiB up to the capacity of the GPU unless given.
            coverage: share of jobs that the safe bytes shall cover.
            place: the GPU; the one that the model learnt from unless given.
            features: what :meth:`features` gives, where that is known.
            unseen: what :attr:`support` says of the jobs, where that is known.

        Raises:
            InvalidRequestError: when the coverage lies outside the calibrated ones.
        """
        place = place or self.own_place
        level = self.level(coverage)
        if features is None:
            features = self.features(table, place)
        if unseen is None:
            unseen = self.support.check(table, features)
        distribution, reference, expected, bounds, is_broken = self.run(table, features)
        safe = bounds[:, level] if place.site is None else place.site.bounds(expected, bounds)[:, level]
        reasons = {row: unseen.reasons(row) for row in unseen.counts.nonzero()[0].tolist()}
        if is_broken is not None:
            reasons |= {row: (*reasons.get(row, ()), NO_NUMBER) for row in is_broken.nonzero()[0].tolist()}
        if reasons:
            outside = np.zeros(len(table), dtype=np.bool_)
            outside[list(reasons)] = True
            scales = np.where(unseen.has_unseen_option, self.card.option_log_scale, self.card.range_log_scale)
            distribution = distribution.replaced(outside, np.log(reference), scales)
            expected = np.where(outside, reference, expected)
        traced = None if self.card.traced_peak is None else table.column("traced_peak_bytes")
        if traced is not None and traced.any():
            distribution, expected, safe, theirs = self._with_traces(table, traced, distribution, expected, safe, level)
            reasons = {row: words for row, words in (reasons | theirs).items() if words}
        if (added := added_by_replicas(table, None if traced is None else traced > 0)) is not None:
            distribution = distribution.moved(added.expected_bytes)
            expected, safe = expected + added.expected_bytes, safe + added.bound_bytes
        if place.context_bytes or place.context_bound_bytes:
            expected = np.maximum(expected + place.context_bytes, 1.0)
            safe = safe + place.context_bound_bytes
        safe = np.ceil(np.maximum(safe, expected))
        if bins is None:
            bins = self._default_bins if place is self.own_place else bins_of_width(GIB, place.capacity_bytes)
        model = AnsweringModel(self.card.name, self.card.version, self.card.label_source, place.gpu, bins)
        return PredictionTable(
            np.minimum(np.rint(expected), _MOST_BYTES).astype(np.int64),
            np.minimum(safe, _MOST_BYTES).astype(np.int64),
            reasons,
            coverage,
            (ModelAnswer(model, np.arange(len(table)), distribution, _log_edges(bins, place)),),
        )

    def _with_traces(
        self,
        table: JobTable,
        traced: NDArray[np.float64],
        distribution: MemoryDistribution,
        expected: NDArray[np.float64],
        safe: NDArray[np.float64],
        level: int,
    ) -> tuple[MemoryDistribution, NDArray[np.float64], NDArray[np.float64], dict[int, tuple[str, ...]]]:
        """Answers in which jobs with a traced peak are answered from it, and why these lie outside of its calibration.

        A trace has seen what a feature vector cannot.
        """
        calibration = self.card.traced_peak
        assert calibration is not None
        is_traced = traced > 0
        centre = np.log(traced + self.card.context_bytes)
        distribution = distribution.mixed(is_traced, centre + calibration.log_shift, calibration.weights, calibration.log_scales)
        expected = np.where(is_traced, np.exp(centre + calibration.log_shift), expected)
        safe = np.where(is_traced, np.exp(centre + calibration.log_bounds[level]), safe)
        reasons = {
            row: option_reasons(table, row, calibration.options, "traced jobs were measured with")
            for row in is_traced.nonzero()[0].tolist()
        }
        return distribution, expected, safe, reasons


def _are_numbers(weights: Array, locations: Array, scales: Array, amounts: Array) -> bool:
    """Whether a graph has answered with numbers; a spoilt one may not for some job, though it did when it was tried."""
    products = np.vdot(weights, locations), np.vdot(scales, scales), np.vdot(amounts, amounts)
    return all(map(math.isfinite, products))


def _in_bytes(amounts: Array) -> NDArray[np.float64]:
    """Amounts from their logarithms."""
    amounts_bytes: NDArray[np.float64] = np.exp(np.minimum(amounts, MOST_LOG_BYTES, dtype=np.float64))
    return amounts_bytes


def _log_edges(bins: BinScheme, place: Place) -> NDArray[np.float64]:
    """Edges between the bins, less what the context at ``place`` takes beyond the model's own."""
    log_edges = bins.log_inner_edges
    if place.context_bytes:
        log_edges = np.log(np.maximum(np.exp(log_edges) - place.context_bytes, 1.0))
    return log_edges


def load_session(bundle: Bundle) -> onnxruntime.InferenceSession:
    """The bundle's graph in onnxruntime, tried once.

    Raises:
        BundleError: when it does not load or run, or is no graph of a bundle.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # at these sizes a second thread costs more than it gives
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(bundle.model, options, providers=["CPUExecutionProvider"])
        inputs = {entry.name: entry.shape for entry in session.get_inputs()}
        outputs = {entry.name for entry in session.get_outputs()}
    except Exception as error:  # onnxruntime raises its own, undocumented classes
        raise BundleError(f"{bundle.source}: the graph does not load ({type(error).__name__})") from None
    wanted: dict[str, int | None] = {"features": len(FEATURE_NAMES)}
    if bundle.card.encoder == "transformer":
        wanted |= {"sequences": len(SEQUENCE_COLUMNS), "mask": None}
    described = ", ".join(f"{name} [… {width}]" if width else name for name, width in wanted.items())
    fits = inputs.keys() == wanted.keys() and all(width in (None, inputs[name][-1]) for name, width in wanted.items())
    if not fits or not outputs >= set(GRAPH_OUTPUTS):
        raise BundleError(f"{bundle.source}: the graph must map {described} to {', '.join(GRAPH_OUTPUTS)}")
    shapes = {"features": (1, len(FEATURE_NAMES)), "sequences": (1, 1, len(SEQUENCE_COLUMNS)), "mask": (1, 1)}
    try:
        answer = session.run(GRAPH_OUTPUTS, {name: np.ones(shapes[name], dtype=np.float32) for name in wanted})
        has_numbers = all(np.isfinite(output).all() for output in answer)
    except Exception as error:
        raise BundleError(f"{bundle.source}: the graph does not run ({type(error).__name__})") from None
    if answer[-1].shape != (1, 2 + len(bundle.card.coverages)):
        raise BundleError(f"{bundle.source}: the graph does not give a bound for each of the card's coverages")
    if not has_numbers:
        raise BundleError(f"{bundle.source}: the graph gives infinity or no number where an amount should stand")
    return session
