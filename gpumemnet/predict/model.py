"""One bundle, ready to run: from features through its graph to estimates, for jobs that it is asked about on any GPU.

Which bundle answers for a job is :mod:`gpumemnet.predict.predictor`'s affair.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from gpumemnet.errors import BundleError, InvalidRequestError
from gpumemnet.features.sequence import SEQUENCE_COLUMNS, layer_sequence
from gpumemnet.features.vector import FEATURE_NAMES, feature_matrix
from gpumemnet.gpu.catalogue import context, device_profile
from gpumemnet.job.job_batch import Indices, JobBatch
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.replicas import added_by_replicas
from gpumemnet.predict.bins import BinScheme, bins_of_width
from gpumemnet.predict.bundle import COMMON, GRAPH_OUTPUTS, Bundle
from gpumemnet.predict.distribution import MOST_LOG_BYTES, MemoryDistribution
from gpumemnet.predict.estimate import Estimate
from gpumemnet.predict.estimates import Estimates
from gpumemnet.predict.reasons import Reasons, outside_rows
from gpumemnet.predict.site_calibration import SiteCalibration
from gpumemnet.predict.support import Against, Support, option_reasons
from gpumemnet.units import GIB

Array = NDArray[np.floating[Any]]

_ROWS_AT_ONCE: Final = {"mlp": 256, "transformer": 32, COMMON: 256}
"""So many jobs go through a graph at once: more would fall out of the processor's cache, and take memory that stays taken."""
_NO_NUMBER: Final = "the model gives no number for it"
_NOTHING_AGAINST: Final = Against([()], [False], [0])
"""What speaks against a job inside the support."""
_MOST_BOUND_BYTES: Final = 2.0**62
"""However large a graph's bounds are, they stay numbers of 64 bits."""


class GraphAnswer(NamedTuple):
    """What a bundle's graph says of ``B`` jobs: distributions; closed form and expected ``[B]``, bounds ``[B, L]``, in bytes.

    Where ``is_broken`` is set, the graph says nothing of the jobs ``[B]`` in it, and all amounts are the GPU's capacity.
    """

    distribution: MemoryDistribution
    reference_bytes: NDArray[np.float64]
    expected_bytes: NDArray[np.float64]
    bounds_bytes: NDArray[np.float64]
    is_broken: NDArray[np.bool_] | None


class Looked(NamedTuple):
    """What a model sees of ``B`` jobs before it answers.

    Attributes:
        features: shape ``[B, F]``; of a batch without layers the columns of the totals alone.
        against: what speaks against its answers.
    """

    features: NDArray[np.float64]
    against: Against

    def take(self, rows: Sequence[int] | Indices) -> Looked:
        """The same of the jobs in ``rows``, which rise."""
        return Looked(self.features[np.asarray(rows, dtype=np.int64)], self.against.take(rows))


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

    def run(self, jobs: Sequence[TrainingJob], features: NDArray[np.float64]) -> GraphAnswer:
        """The graph's answer for ``B`` jobs with their features, shape ``[B, F]``; without layers the totals will do."""
        step = self._rows_at_once
        if len(features) <= step:
            weights, locations, scales, amounts = self._run(jobs, features)
        else:
            starts = range(0, len(features), step)
            parts = [self._run(jobs[at : at + step] if self.needs_layers else jobs, features[at : at + step]) for at in starts]
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
            np.minimum(amounts_bytes[:, 2:], _MOST_BOUND_BYTES),
            is_broken,
        )

    def _run(self, jobs: Sequence[TrainingJob], features: NDArray[np.float64]) -> list[Any]:
        answer: list[Any]
        if self.needs_layers:
            sequences, mask = layer_sequence(jobs)
            inputs = {"features": features.astype(np.float32), "sequences": sequences, "mask": mask.astype(np.float32)}
            answer = self._session.run(GRAPH_OUTPUTS, inputs)
            return answer
        rows = np.zeros((len(features), len(FEATURE_NAMES)), dtype=np.float32)
        rows[:, : features.shape[1]] = features
        answer = self._session.run(GRAPH_OUTPUTS, {"features": rows})
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

    def look(self, jobs: Sequence[TrainingJob], place: Place) -> Looked:
        """What there is to see of the jobs on the GPU ``place``."""
        features = feature_matrix(jobs, place.blas_workspace_bytes)
        return Looked(features, self.support.against(jobs, features))

    def glance(self, jobs: JobBatch, place: Place, totals: NDArray[np.float64]) -> Reasons:
        """The reasons against the jobs of a batch alone: without the layers' features, where the support is not about those.

        Args:
            jobs: the jobs.
            place: the GPU.
            totals: their :func:`~gpumemnet.features.vector.total_matrix`.
        """
        is_short = self.support.is_about_totals
        reasons = self.support.against(jobs, totals if is_short else feature_matrix(jobs, place.blas_workspace_bytes)).reasons
        assert isinstance(reasons, Reasons)
        return reasons

    def answer(self, job: TrainingJob, bins: BinScheme | None, coverage: float, place: Place) -> Estimate | None:
        """The :meth:`estimate` of one job, sooner: in plain numbers where that can be; nothing where it lies outside the support.

        Raises:
            InvalidRequestError: when the coverage lies outside the calibrated ones.
        """
        level = self.level(coverage)
        if not self.support.knows(job):
            return None
        features = feature_matrix((job,), place.blas_workspace_bytes)
        if not self.support.spans(features[0].tolist()):
            return None
        looked = Looked(features, _NOTHING_AGAINST)
        if job.is_replica or (job.traced_peak_bytes and self.card.traced_peak is not None):
            return self.estimate((job,), bins, coverage, place, looked)[0]
        weights, locations, scales, amounts = self._run((job,), features)
        if not _are_numbers(weights, locations, scales, amounts):
            return self.estimate((job,), bins, coverage, place, looked)[0]
        amounts_bytes = _in_bytes(amounts)
        bounds = np.minimum(amounts_bytes[:, 2:], _MOST_BOUND_BYTES)
        if place.site is not None:
            bounds = place.site.bounds(amounts_bytes[:, 1], bounds)
        expected, safe = float(amounts_bytes[0, 1]), float(bounds[0, level])
        if place.context_bytes or place.context_bound_bytes:
            expected, safe = max(expected + place.context_bytes, 1.0), safe + place.context_bound_bytes
        if bins is None:
            bins = self._bins_of(place)
        return Estimate(
            expected_bytes=round(expected),
            safe_bytes=math.ceil(max(safe, expected)),
            coverage=coverage,
            bins=bins,
            probabilities=MemoryDistribution(weights, locations, scales).bin_probabilities(_log_edges(bins, place))[0],
            in_support=True,
            reasons=(),
            gpu=place.gpu,
            estimator=self.card.name,
            version=self.card.version,
            label_source=self.card.label_source,
        )

    def _bins_of(self, place: Place) -> BinScheme:
        """Bins for a question that names none: of 1 GiB, up to the capacity of the GPU."""
        return self._default_bins if place is self.own_place else bins_of_width(GIB, place.capacity_bytes)

    def estimate(
        self,
        jobs: Sequence[TrainingJob],
        bins: BinScheme | None,
        coverage: float,
        place: Place | None = None,
        looked: Looked | None = None,
    ) -> Estimates:
        """Estimates of jobs that all belong to the bundle's family; ``looked`` is what :meth:`look` gave, where that is known."""
        place = place or self.own_place
        if bins is None:
            bins = self._bins_of(place)
        level = self.level(coverage)
        features, (reasons, has_unseen_option, _) = looked or self.look(jobs, place)
        distribution, reference, expected, bounds, is_broken = self.run(jobs, features)
        if is_broken is not None:
            reasons = [(*own, _NO_NUMBER) if one else tuple(own) for one, own in zip(is_broken.tolist(), reasons, strict=True)]
        safe = bounds[:, level] if place.site is None else place.site.bounds(expected, bounds)[:, level]
        if outside_rows(reasons):
            outside = reasons.counts > 0 if isinstance(reasons, Reasons) else np.array([bool(row) for row in reasons])
            scales = np.where(has_unseen_option, self.card.option_log_scale, self.card.range_log_scale)
            distribution = distribution.replaced(outside, np.log(reference), scales)
            expected = np.where(outside, reference, expected)
        traced = None if self.card.traced_peak is None else _traced(jobs)
        if traced is not None:
            distribution, expected, safe, reasons = self._with_traces(jobs, traced, distribution, expected, safe, reasons, level)
        if (added := added_by_replicas(jobs, None if traced is None else traced > 0)) is not None:
            distribution = distribution.moved(added.expected_bytes)
            expected, safe = expected + added.expected_bytes, safe + added.bound_bytes
        if place.context_bytes or place.context_bound_bytes:
            expected = np.maximum(expected + place.context_bytes, 1.0)
            safe = safe + place.context_bound_bytes
        outside_reasons = {}
        safe = np.ceil(np.maximum(safe, expected))
        rows = outside_rows(reasons)
        if rows:
            outside_reasons = {row: reasons[row] for row in rows}
            safe[rows] = np.nan
        return Estimates(
            expected_bytes=np.rint(expected),
            safe_bytes=safe,
            distribution=distribution,
            log_edges=_log_edges(bins, place),
            reasons=outside_reasons,
            coverage=coverage,
            bins=bins,
            gpu=place.gpu,
            estimator=self.card.name,
            version=self.card.version,
            label_source=self.card.label_source,
        )

    def _with_traces(
        self,
        jobs: Sequence[TrainingJob],
        traced: NDArray[np.float64],
        distribution: MemoryDistribution,
        expected: NDArray[np.float64],
        safe: NDArray[np.float64],
        reasons: Sequence[tuple[str, ...]],
        level: int,
    ) -> tuple[MemoryDistribution, NDArray[np.float64], NDArray[np.float64], Sequence[tuple[str, ...]]]:
        """Answers in which jobs with a traced peak are answered from it: it has seen what a feature vector cannot."""
        calibration = self.card.traced_peak
        assert calibration is not None
        is_traced = traced > 0
        centre = np.log(traced + self.card.context_bytes)
        distribution = distribution.mixed(is_traced, centre + calibration.log_shift, calibration.weights, calibration.log_scales)
        expected = np.where(is_traced, np.exp(centre + calibration.log_shift), expected)
        safe = np.where(is_traced, np.exp(centre + calibration.log_bounds[level]), safe)
        reasons = [
            option_reasons(jobs[row], calibration.options, "traced jobs were measured with") if is_one else own
            for row, (is_one, own) in enumerate(zip(is_traced.tolist(), reasons, strict=True))
        ]
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


def _traced(jobs: Sequence[TrainingJob]) -> NDArray[np.float64] | None:
    """What traces found, in bytes, and 0 for jobs that nobody traced; nothing where nobody traced any."""
    if isinstance(jobs, JobBatch):
        column = jobs.column("traced_peak_bytes")
        return column if column.any() else None
    amounts = [job.traced_peak_bytes or 0 for job in jobs]
    return np.array(amounts, dtype=np.float64) if any(amounts) else None


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
