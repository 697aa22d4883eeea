"""Runs one bundle: from features through its ONNX graph to predictions, for any GPU.

:mod:`gpumemnet.predict.predictor` chooses the bundle for a job.
"""

from __future__ import annotations

import bisect
import math
from functools import lru_cache
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from gpumemnet.errors import BundleError, InvalidRequestError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import describe
from gpumemnet.physics.replicas import added_by_replicas
from gpumemnet.predict.bundle import GRAPH_OUTPUTS, Bundle
from gpumemnet.predict.bundle_card import COMMON, SiteCalibration
from gpumemnet.predict.calibrated_line import (
    group_codes,
    growing_features,
    has_benchmark,
    line_bytes,
    startup_peaks,
    with_log_errors,
)
from gpumemnet.predict.distribution import (
    MOST_LOG_BYTES,
    BinScheme,
    MemoryDistribution,
    bins_of_width,
)
from gpumemnet.predict.features import (
    FEATURE_NAMES,
    SEQUENCE_COLUMNS,
    feature_matrix,
    layer_sequence,
)
from gpumemnet.predict.gpu_context import PredictionGpu, label_gpu
from gpumemnet.predict.prediction import ModelDistributions, PredictingModel, PredictionTable
from gpumemnet.predict.support import Support, Unseen, option_reasons
from gpumemnet.units import GIB

Array = NDArray[np.floating[Any]]

_ROWS_AT_ONCE: Final = {"mlp": 256, "transformer": 32, COMMON: 256}
"""Encoder → jobs per run of the graph; larger runs do not fit the processor's cache, and
onnxruntime keeps their memory."""
CERTAIN_COLUMNS: Final = slice(
    FEATURE_NAMES.index("weight_bytes"), FEATURE_NAMES.index("optimizer_state_bytes") + 1
)
"""What every training step holds at once, whatever else it does: weights, gradients, optimizer
state."""
LINE_SOURCE: Final = "readings_and_traces"
"""Label source of answers by the line over the closed form, which is calibrated on published
readings and on traced jobs."""
NO_NUMBER: Final = "the model gives no number for it"
"""Reason given for a job when the graph outputs infinity or NaN."""
_MOST_BYTES: Final = 2.0**62
"""Upper limit of an amount, so that it fits a 64-bit integer."""


class GraphOutput(NamedTuple):
    """Output of a bundle's graph for ``B`` jobs.

    Attributes:
        distribution: the distributions.
        reference_bytes: the closed form, shape ``[B]``.
        expected_bytes: the expected memory, shape ``[B]``.
        bounds_bytes: the bounds for the ``L`` calibrated coverages, shape ``[B, L]``.
        is_broken: jobs with infinity or NaN in the output, whose amounts are set to the GPU's
            capacity, shape ``[B]``; ``None`` when there are none.
    """

    distribution: MemoryDistribution
    reference_bytes: NDArray[np.float64]
    expected_bytes: NDArray[np.float64]
    bounds_bytes: NDArray[np.float64]
    is_broken: NDArray[np.bool_] | None


class ModelGpu(NamedTuple):
    """The GPU that a prediction is for, as one model sees it.

    Attributes:
        prediction_gpu: the GPU, with the CUDA context that the answer contains.
        least_context_bytes: the context that no answer is below.
        shift_bytes: what the graph's expectation is moved by: the context of the answer, minus the
            one in the model's labels.
        shift_bound_bytes: what the graph's bounds are moved by: the same with the upper bound of
            the context.
        site: a site's calibration for this GPU; ``None`` for the model as trained.
    """

    prediction_gpu: PredictionGpu
    least_context_bytes: int
    shift_bytes: int
    shift_bound_bytes: int
    site: SiteCalibration | None = None


class BundleModel:
    """One bundle loaded for jobs of one family: its graph in onnxruntime, and its support as
    arrays."""

    def __init__(
        self,
        bundle: Bundle,
        family: str | None = None,
        session: onnxruntime.InferenceSession | None = None,
    ) -> None:
        """Loads the bundle for jobs of one family.

        Args:
            bundle: the bundle.
            family: the job family; by default the bundle's first.
            session: the bundle's graph, if it is already loaded.
        """
        self.bundle = bundle
        self.card = card = bundle.card.of(family or bundle.card.families[0])
        self.needs_layers = card.encoder == "transformer"
        self.label_gpu = ModelGpu(label_gpu(card), 0, 0, 0)
        """The GPU and the context of the training labels: for comparing answers with labels like
        them, and for no answer."""
        self._model_gpus: dict[PredictionGpu, ModelGpu] = {}
        self.support = Support(card)
        self._rows_at_once = _ROWS_AT_ONCE[card.encoder]
        self._session = session or load_session(bundle)
        if card.closed_form is not None:
            groups = card.closed_form.groups
            self._slopes = np.array(card.closed_form.slopes)
            self._log_shifts = np.array([group.log_shifts for group in groups])
            self._log_scales = np.array([group.log_scale for group in groups])
            self._log_bounds = np.array([group.log_bounds for group in groups])

    def model_gpu(self, prediction_gpu: PredictionGpu) -> ModelGpu:
        """Returns the GPU as this model sees it; the same object for the same GPU."""
        if prediction_gpu not in self._model_gpus:
            self._model_gpus[prediction_gpu] = self._new_model_gpu(prediction_gpu)
        return self._model_gpus[prediction_gpu]

    def _new_model_gpu(self, prediction_gpu: PredictionGpu) -> ModelGpu:
        site = self.card.site_calibration
        if site is not None and site.gpu == prediction_gpu.gpu:
            return ModelGpu(prediction_gpu, 0, site.shift_bytes, site.shift_bound_bytes, site)
        context, own = prediction_gpu.context, self.card.context_bytes
        return ModelGpu(
            prediction_gpu,
            context.expected_bytes,
            context.expected_bytes - own,
            context.bound_bytes - own,
        )

    def run(self, table: JobTable, features: NDArray[np.float64]) -> GraphOutput:
        """Runs the graph for ``B`` jobs with their features, shape ``[B, F]``."""
        step = self._rows_at_once
        if len(features) <= step:
            weights, locations, scales, amounts = self._run(table, features)
        else:
            starts = range(0, len(features), step)
            parts = [
                self._run(
                    table[at : at + step] if self.needs_layers else table, features[at : at + step]
                )
                for at in starts
            ]
            weights, locations, scales, amounts = map(np.concatenate, zip(*parts, strict=True))
        is_broken = None
        if not _are_numbers(weights, locations, scales, amounts):
            is_number = [
                np.isfinite(output).all(axis=1) for output in (weights, locations, scales, amounts)
            ]
            is_broken = ~np.logical_and.reduce(is_number)
            amounts = np.where(is_broken[:, None], math.log(self.card.capacity_bytes or 1), amounts)
        amounts_bytes = _in_bytes(amounts)
        return GraphOutput(
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
        """Whether ``coverage`` lies within the calibrated coverages."""
        coverages = self.card.coverages
        return type(coverage) in (int, float) and coverages[0] <= coverage <= coverages[-1]

    def level(self, coverage: float) -> int:
        """Position of the smallest calibrated coverage that is at least ``coverage``.

        Raises:
            InvalidRequestError: when ``coverage`` lies outside the calibrated coverages.
        """
        coverages = self.card.coverages
        if not self.reaches(coverage):
            raise InvalidRequestError(
                f"must be between {coverages[0]:g} and {coverages[-1]:g}, for which {self.card.name} was calibrated, "
                f"not {describe(coverage)}",
                "coverage",
            )
        return bisect.bisect_left(coverages, coverage)

    def features(self, table: JobTable, model_gpu: ModelGpu) -> NDArray[np.float64]:
        """Computes feature vectors of ``B`` jobs on the GPU ``model_gpu``, shape ``[B, F]``."""
        return feature_matrix(table, model_gpu.prediction_gpu.blas_workspace_bytes)

    def predict(
        self,
        table: JobTable,
        bins: BinScheme | None,
        coverage: float,
        model_gpu: ModelGpu | None = None,
        features: NDArray[np.float64] | None = None,
        unseen: Unseen | None = None,
    ) -> PredictionTable:
        """Predicts jobs that all belong to the bundle's family.

        Args:
            table: the jobs.
            bins: bin scheme of the probabilities; by default 1 GiB bins up to the capacity of the
                GPU.
            coverage: share of jobs that the safe bytes cover.
            model_gpu: the GPU, from :meth:`model_gpu`; by default :attr:`label_gpu`.
            features: the result of :meth:`features`, if already known.
            unseen: the result of checking the jobs against :attr:`support`, if already known.

        Raises:
            InvalidRequestError: when ``coverage`` lies outside the calibrated coverages.
        """
        model_gpu = model_gpu or self.label_gpu
        level = self.level(coverage)
        if features is None:
            features = self.features(table, model_gpu)
        if unseen is None:
            unseen = self.support.check(table, features)
        by_closed_form = unseen.is_by_closed_form
        if model_gpu.site is not None:  # a site's calibration is of the model's answers
            by_closed_form = by_closed_form & (unseen.counts > 0)
        reasons: dict[int, tuple[str, ...]] = {}
        if by_closed_form.all():
            centre, scale, safe = self._closed_form_amounts(table, features, level, model_gpu)
            distribution, expected = MemoryDistribution.of_logistics(np.log(centre), scale), centre
        else:
            distribution, expected, safe, reasons = self._graph_amounts(
                table, features, unseen, level, model_gpu.site
            )
            if by_closed_form.any():
                rows = by_closed_form.nonzero()[0]
                centre, scale, bound = np.zeros((3, len(table)))
                amounts = self._closed_form_amounts(
                    table.take(rows), features[rows], level, model_gpu
                )
                centre[rows], scale[rows], bound[rows] = amounts
                distribution = distribution.replaced(
                    by_closed_form, np.log(np.maximum(centre, 1.0)), scale
                )
                expected = np.where(by_closed_form, centre, expected)
                safe = np.where(by_closed_form, bound, safe)
                reasons = {row: words for row, words in reasons.items() if not by_closed_form[row]}
        traced = None if self.card.traced_peak is None else table.column("traced_peak_bytes")
        if traced is not None and traced.any():
            distribution, expected, safe, theirs = self._with_traces(
                table, traced, distribution, expected, safe, level
            )
            reasons = {row: words for row, words in (reasons | theirs).items() if words}
        safe = safe + model_gpu.shift_bound_bytes
        least = model_gpu.least_context_bytes + features[:, CERTAIN_COLUMNS].sum(axis=1)
        shifted = expected + model_gpu.shift_bytes
        if (least > shifted).any():
            missing = np.maximum(least - shifted, 0.0)
            distribution, shifted = (
                distribution.moved(missing),
                expected + missing + model_gpu.shift_bytes,
            )
        expected, safe = shifted, np.maximum(safe, shifted)
        if (added := added_by_replicas(table, None if traced is None else traced > 0)) is not None:
            distribution = distribution.moved(added.expected_bytes)
            expected, safe = expected + added.expected_bytes, safe + added.bound_bytes
        safe = np.ceil(safe)
        prediction_gpu = model_gpu.prediction_gpu
        startup = startup_peaks(
            expected,
            features,
            prediction_gpu.context.expected_bytes,
            prediction_gpu.available_bytes,
        )
        bins = bins or _gib_bins(prediction_gpu.capacity_bytes)
        edges = _log_edges(bins, model_gpu.shift_bytes)
        answers = []
        for source, chosen in (
            (self.card.label_source, ~by_closed_form),
            (LINE_SOURCE, by_closed_form),
        ):
            rows = chosen.nonzero()[0]
            if len(rows):
                model = PredictingModel(
                    self.card.name, self.card.version, source, prediction_gpu, bins
                )
                answers.append(ModelDistributions(model, rows, distribution.take(rows), edges))
        expected_bytes = _whole_bytes(expected)
        return PredictionTable(
            expected_bytes,
            _whole_bytes(safe),
            reasons,
            coverage,
            answers,
            expected_bytes if startup is expected else _whole_bytes(startup),
        )

    def _graph_amounts(
        self,
        table: JobTable,
        features: NDArray[np.float64],
        unseen: Unseen,
        level: int,
        site: SiteCalibration | None,
    ) -> tuple[
        MemoryDistribution, NDArray[np.float64], NDArray[np.float64], dict[int, tuple[str, ...]]
    ]:
        """The graph's answers for ``B`` jobs, with the context of the labels.

        Returns:
            Distributions, expected bytes, bounds in bytes for the coverage at ``level``; why rows
            have no bound.
        """
        distribution, reference, expected, bounds, is_broken = self.run(table, features)
        safe = bounds[:, level] if site is None else site.bounds(expected, bounds)[:, level]
        reasons = {row: unseen.reasons(row) for row in unseen.counts.nonzero()[0].tolist()}
        if is_broken is not None:
            reasons |= {
                row: (*reasons.get(row, ()), NO_NUMBER) for row in is_broken.nonzero()[0].tolist()
            }
        if reasons:
            outside = np.zeros(len(table), dtype=np.bool_)
            outside[list(reasons)] = True
            scales = np.where(
                unseen.has_unseen_option, self.card.option_log_scale, self.card.range_log_scale
            )
            distribution = distribution.replaced(outside, np.log(reference), scales)
            expected = np.where(outside, reference, expected)
        return distribution, expected, safe, reasons

    def _closed_form_amounts(
        self, table: JobTable, features: NDArray[np.float64], level: int, model_gpu: ModelGpu
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """The closed form's answers for ``B`` jobs, with the context of the labels.

        Returns:
            Expected bytes, scale of a logistic in log-bytes, and the bound in bytes for the
            coverage at ``level``, ``[B]`` each.
        """
        smoothed = growing_features(table, features, model_gpu.prediction_gpu.blas_workspace_bytes)
        line, codes = line_bytes(smoothed, self._slopes), group_codes(features)
        shifts = self._log_shifts[codes, has_benchmark(features)]
        centre, bound = (
            with_log_errors(line, shifts),
            with_log_errors(line, shifts + self._log_bounds[codes, level]),
        )
        return (
            np.maximum(centre + self.card.context_bytes, 1.0),
            self._log_scales[codes],
            bound + self.card.context_bytes,
        )

    def _with_traces(
        self,
        table: JobTable,
        traced: NDArray[np.float64],
        distribution: MemoryDistribution,
        expected: NDArray[np.float64],
        safe: NDArray[np.float64],
        level: int,
    ) -> tuple[
        MemoryDistribution, NDArray[np.float64], NDArray[np.float64], dict[int, tuple[str, ...]]
    ]:
        """Replaces the predictions of jobs with a traced peak by ones based on that peak.

        A trace contains allocations that the feature vector cannot describe.

        Returns:
            Distributions, expected bytes and safe bytes of all jobs; for each job with a traced
            peak, the reasons why it lies outside the calibration.
        """
        calibration = self.card.traced_peak
        assert calibration is not None
        is_traced = traced > 0
        centre = np.log(traced + self.card.context_bytes)
        distribution = distribution.mixed(
            is_traced, centre + calibration.log_shift, calibration.weights, calibration.log_scales
        )
        expected = np.where(is_traced, np.exp(centre + calibration.log_shift), expected)
        safe = np.where(is_traced, np.exp(centre + calibration.log_bounds[level]), safe)
        reasons = {
            row: option_reasons(table, row, calibration.options, "traced jobs were measured with")
            for row in is_traced.nonzero()[0].tolist()
        }
        return distribution, expected, safe, reasons


def _are_numbers(weights: Array, locations: Array, scales: Array, amounts: Array) -> bool:
    """Whether all outputs are finite; a damaged graph can pass the trial run and still output NaN
    for some job."""
    products = np.vdot(weights, locations), np.vdot(scales, scales), np.vdot(amounts, amounts)
    return all(map(math.isfinite, products))


def _whole_bytes(amounts: Array) -> NDArray[np.int64]:
    """Amounts as the nearest integers."""
    whole: NDArray[np.int64] = np.minimum(np.rint(amounts), _MOST_BYTES).astype(np.int64)
    return whole


def _in_bytes(amounts: Array) -> NDArray[np.float64]:
    """Amounts in bytes from their logarithms."""
    amounts_bytes: NDArray[np.float64] = np.exp(
        np.minimum(amounts, MOST_LOG_BYTES, dtype=np.float64)
    )
    return amounts_bytes


@lru_cache(maxsize=64)
def _log_edges(bins: BinScheme, shift_bytes: int) -> NDArray[np.float64]:
    """Edges between the bins in log-bytes, as amounts that contain the context of the model's
    labels; read-only."""
    log_edges = bins.log_inner_edges
    if shift_bytes:
        log_edges = np.log(np.maximum(np.exp(log_edges) - shift_bytes, 1.0))
    log_edges.flags.writeable = False
    return log_edges


@lru_cache(maxsize=256)
def _gib_bins(capacity_bytes: int) -> BinScheme:
    return bins_of_width(GIB, capacity_bytes)


_SESSIONS: Final = WeakValueDictionary[tuple[bytes, str, int], onnxruntime.InferenceSession]()
"""Sessions in use, by graph, encoder and number of coverages: releases that follow each other have
most graphs in common."""


def load_session(bundle: Bundle) -> onnxruntime.InferenceSession:
    """Loads the bundle's graph into onnxruntime and runs it once; predictors in one process share
    the sessions of equal graphs.

    Raises:
        BundleError: when the graph does not load or run, or has other inputs or outputs than a
            bundle's graph.
    """
    key = bundle.model, bundle.card.encoder, len(bundle.card.coverages)
    session = _SESSIONS.get(key)
    if session is None:
        session = _SESSIONS[key] = _checked_session(bundle)
    return session


def _checked_session(bundle: Bundle) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = (
        1  # for graphs this small a second thread costs more than it saves
    )
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            bundle.model, options, providers=["CPUExecutionProvider"]
        )
        inputs = {entry.name: entry.shape for entry in session.get_inputs()}
        outputs = {entry.name for entry in session.get_outputs()}
    except Exception as error:  # onnxruntime raises undocumented exception classes
        raise BundleError(
            f"{bundle.source}: the graph does not load ({type(error).__name__})"
        ) from None
    wanted: dict[str, int | None] = {"features": len(FEATURE_NAMES)}
    if bundle.card.encoder == "transformer":
        wanted |= {"sequences": len(SEQUENCE_COLUMNS), "mask": None}
    described = ", ".join(
        f"{name} [… {width}]" if width else name for name, width in wanted.items()
    )
    fits = inputs.keys() == wanted.keys() and all(
        width in (None, inputs[name][-1]) for name, width in wanted.items()
    )
    if not fits or not outputs >= set(GRAPH_OUTPUTS):
        raise BundleError(
            f"{bundle.source}: the graph must map {described} to {', '.join(GRAPH_OUTPUTS)}"
        )
    shapes = {
        "features": (1, len(FEATURE_NAMES)),
        "sequences": (1, 1, len(SEQUENCE_COLUMNS)),
        "mask": (1, 1),
    }
    try:
        answer = session.run(
            GRAPH_OUTPUTS, {name: np.ones(shapes[name], dtype=np.float32) for name in wanted}
        )
        has_numbers = all(np.isfinite(output).all() for output in answer)
    except Exception as error:
        raise BundleError(
            f"{bundle.source}: the graph does not run ({type(error).__name__})"
        ) from None
    if answer[-1].shape != (1, 2 + len(bundle.card.coverages)):
        raise BundleError(
            f"{bundle.source}: the graph does not give a bound for each of the card's coverages"
        )
    if not has_numbers:
        raise BundleError(
            f"{bundle.source}: the graph gives infinity or no number where an amount should stand"
        )
    return session
