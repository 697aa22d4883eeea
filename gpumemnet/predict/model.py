"""Runs one bundle: from a table of jobs through its ONNX graph to predictions, for any GPU."""

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
from gpumemnet.predict.bundle_card import SiteCalibration
from gpumemnet.predict.distribution import (
    MOST_LOG_BYTES,
    BinScheme,
    MemoryDistribution,
    bins_of_width,
)
from gpumemnet.predict.features import (
    FEATURE_NAMES,
    SEQUENCE_COLUMNS,
    layer_sequence,
    model_features,
)
from gpumemnet.predict.gpu_context import PredictionGpu
from gpumemnet.predict.prediction import PredictingModel, PredictionTable
from gpumemnet.predict.support import Support, option_reasons
from gpumemnet.units import GIB, MIB

Array = NDArray[np.floating[Any]]

_ROWS_AT_ONCE: Final = {"mlp": 256, "transformer": 32}
"""Encoder → jobs per run of the graph; larger runs do not fit the processor's cache, and
onnxruntime keeps their memory."""
CERTAIN_COLUMNS: Final = slice(
    FEATURE_NAMES.index("weight_bytes"), FEATURE_NAMES.index("optimizer_state_bytes") + 1
)
"""What every training step holds at once, whatever else it does: weights, gradients, optimizer
state."""
SLACK_BYTES: Final = 256 * MIB
"""Errors are relative to memory above the context and this: those of small jobs are a few segments,
whatever their size."""
NO_NUMBER: Final = "the model gives no number for it"
"""Reason given for a job when the graph outputs infinity or NaN."""
SEARCH_COPIES: Final = 3.5
"""What a search of ``cudnn.benchmark`` holds, in bytes of the input and output of its convolution:
both once, their gradients or copies in another layout, and a workspace of 1.5 times them.  Fitted to
traced jobs it is 3.3 to 3.5 in each of five folds over architecture families
(docs/evaluation/real_networks.md)."""
_CONVOLUTION, _WEIGHTS, _BENCHMARK = (
    FEATURE_NAMES.index(name)
    for name in ("largest_convolution_bytes", "weight_bytes", "is_cudnn_benchmark")
)
_MOST_BYTES: Final = 2.0**62
"""Upper limit of an amount, so that it fits a 64-bit integer."""


class GraphOutput(NamedTuple):
    """Output of a bundle's graph for ``B`` jobs; all amounts are above the CUDA context.

    Attributes:
        distribution: the distributions.
        line_bytes: the line over the closed form, shape ``[B]``.
        expected_bytes: the expected memory, shape ``[B]``.
        bounds_bytes: the bounds for the ``L`` calibrated coverages, shape ``[B, L]``.
        is_broken: jobs with infinity or NaN in the output, whose amounts are set to 1 TiB, shape
            ``[B]``; ``None`` when there are none.
    """

    distribution: MemoryDistribution
    line_bytes: NDArray[np.float64]
    expected_bytes: NDArray[np.float64]
    bounds_bytes: NDArray[np.float64]
    is_broken: NDArray[np.bool_] | None


class ModelGpu(NamedTuple):
    """The GPU that a prediction is for, as one model sees it.

    Attributes:
        prediction_gpu: the GPU, with the CUDA context that the answer contains.
        least_context_bytes: the context that no answer is below.
        shift_bytes: what the graph's expectation is moved by: the context.
        shift_bound_bytes: what the graph's bounds are moved by: the upper bound of the context.
        site: a site's calibration for this GPU, which then gives both shifts; ``None`` for the
            model as trained.
    """

    prediction_gpu: PredictionGpu
    least_context_bytes: int
    shift_bytes: int
    shift_bound_bytes: int
    site: SiteCalibration | None = None


class BundleModel:
    """One loaded bundle: its graph in onnxruntime, and its support as arrays."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.card = bundle.card
        self.needs_layers = bundle.card.encoder == "transformer"
        self.support = Support(bundle.card)
        self._model_gpus: dict[PredictionGpu, ModelGpu] = {}
        self._rows_at_once = _ROWS_AT_ONCE[bundle.card.encoder]
        self._session = load_session(bundle)

    def model_gpu(self, prediction_gpu: PredictionGpu) -> ModelGpu:
        """Returns the GPU as this model sees it; the same object for the same GPU."""
        if prediction_gpu not in self._model_gpus:
            self._model_gpus[prediction_gpu] = self._new_model_gpu(prediction_gpu)
        return self._model_gpus[prediction_gpu]

    def _new_model_gpu(self, prediction_gpu: PredictionGpu) -> ModelGpu:
        site = self.card.site_calibration
        if site is not None and site.gpu == prediction_gpu.gpu:
            return ModelGpu(prediction_gpu, 0, site.shift_bytes, site.shift_bound_bytes, site)
        context = prediction_gpu.context
        expected = context.expected_bytes
        return ModelGpu(prediction_gpu, expected, expected, context.bound_bytes)

    def run(self, table: JobTable, features: NDArray[np.float64]) -> GraphOutput:
        """Runs the graph for ``B`` jobs with their :meth:`features`."""
        step = self._rows_at_once
        if len(features) <= step:
            weights, locations, scales, amounts = self._run(table, features)
        else:
            parts = [
                self._run(
                    table[at : at + step] if self.needs_layers else table, features[at : at + step]
                )
                for at in range(0, len(features), step)
            ]
            weights, locations, scales, amounts = map(np.concatenate, zip(*parts, strict=True))
        is_broken = None
        if not _are_numbers(weights, locations, scales, amounts):
            is_number = [
                np.isfinite(output).all(axis=1) for output in (weights, locations, scales, amounts)
            ]
            is_broken = ~np.logical_and.reduce(is_number)
            amounts = np.where(is_broken[:, None], math.log(1024.0 * GIB), amounts)
        amounts_bytes = np.exp(np.minimum(amounts, MOST_LOG_BYTES, dtype=np.float64))
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

    def level(self, coverage: float) -> int:
        """Position of the smallest calibrated coverage that is at least ``coverage``.

        Raises:
            InvalidRequestError: when ``coverage`` lies outside the calibrated coverages.
        """
        coverages = self.card.coverages
        if type(coverage) not in (int, float) or not coverages[0] <= coverage <= coverages[-1]:
            raise InvalidRequestError(
                f"must be between {coverages[0]:g} and {coverages[-1]:g}, for which {self.card.name} was calibrated, "
                f"not {describe(coverage)}",
                "coverage",
            )
        return bisect.bisect_left(coverages, coverage)

    def features(self, table: JobTable, model_gpu: ModelGpu) -> NDArray[np.float64]:
        """Computes what the graph reads of ``B`` jobs on the GPU ``model_gpu``, ``[B, 2 F]``."""
        return model_features(table, model_gpu.prediction_gpu.blas_workspace_bytes)

    def predict(
        self, table: JobTable, bins: BinScheme | None, coverage: float, model_gpu: ModelGpu
    ) -> PredictionTable:
        """Predicts jobs of the bundle's families.

        Args:
            table: the jobs.
            bins: bin scheme of the probabilities; by default 1 GiB bins up to the capacity of the
                GPU.
            coverage: share of jobs that the safe bytes cover.
            model_gpu: the GPU, from :meth:`model_gpu`.

        Raises:
            InvalidRequestError: when ``coverage`` lies outside the calibrated coverages.
        """
        level, site = self.level(coverage), model_gpu.site
        features = self.features(table, model_gpu)
        unseen = self.support.check(table, features)
        distribution, _, expected, bounds, is_broken = self.run(table, features)
        safe = bounds[:, level] if site is None else site.bounds(expected, bounds)[:, level]
        reasons = {row: unseen.reasons(row) for row in unseen.counts.nonzero()[0].tolist()}
        is_unbounded = unseen.is_unknown
        if reasons:
            is_outside = unseen.counts > 0
            wider = safe * math.exp(self.card.widenings[level])
            stretch = np.log(wider / expected) / np.maximum(np.log(safe / expected), 1e-3)
            distribution = distribution.widened(np.where(is_outside, np.maximum(stretch, 1.0), 1.0))
            safe = np.where(is_outside, wider, safe)
        if is_broken is not None:
            is_unbounded = is_unbounded | is_broken
            reasons |= {
                row: (*reasons.get(row, ()), NO_NUMBER) for row in is_broken.nonzero()[0].tolist()
            }
        traced = table.column("traced_peak_bytes") if self.card.traced_peaks else None
        if traced is not None and traced.any():
            distribution, by_trace = self._with_traces(
                table, traced, distribution, expected, safe, level
            )
            is_unbounded = is_unbounded.copy()
            for row, words in by_trace.items():
                is_unbounded[row] = bool(words)
            reasons = {row: words for row, words in (reasons | by_trace).items() if words}
        shift, safe = model_gpu.shift_bytes, safe + model_gpu.shift_bound_bytes
        least = model_gpu.least_context_bytes + features[:, CERTAIN_COLUMNS].sum(axis=1)
        missing = np.maximum(least - (expected + shift), 0.0)
        if missing.any():
            distribution = distribution.moved(missing)
        expected = expected + missing + shift
        safe = np.maximum(safe, expected)
        if (added := added_by_replicas(table, None if traced is None else traced > 0)) is not None:
            distribution = distribution.moved(added.expected_bytes)
            expected, safe = expected + added.expected_bytes, safe + added.bound_bytes
        gpu = model_gpu.prediction_gpu
        startup = _startup_peaks(expected, features, gpu)
        bins = bins or _gib_bins(gpu.capacity_bytes)
        model = PredictingModel(
            self.card.name, self.card.version, self.card.label_source, gpu, bins
        )
        return PredictionTable(
            model,
            _whole_bytes(expected),
            np.ma.MaskedArray(_whole_bytes(np.ceil(safe)), mask=is_unbounded),
            reasons,
            coverage,
            distribution,
            _log_edges(bins, shift),
            _whole_bytes(startup),
        )

    def _with_traces(
        self,
        table: JobTable,
        traced: NDArray[np.float64],
        distribution: MemoryDistribution,
        expected: NDArray[np.float64],
        safe: NDArray[np.float64],
        level: int,
    ) -> tuple[MemoryDistribution, dict[int, tuple[str, ...]]]:
        """Replaces what is predicted of jobs with a traced peak by what that peak says, in place.

        A trace contains allocations that the feature vector cannot describe.

        Returns:
            The distributions; for each job with a traced peak, the reasons why it lies outside the
            calibration, and has no bound.
        """
        families = table.option_column("family")
        reasons = {}
        for family, calibration in self.card.traced_peaks.items():
            rows = ((traced > 0) & (families == family)).nonzero()[0]
            if not len(rows):
                continue
            peak = np.log(traced[rows] + SLACK_BYTES)
            with_slack = np.exp(peak + calibration.log_shift)
            amounts = np.maximum(with_slack - SLACK_BYTES, 1.0)
            expected[rows] = amounts
            safe[rows] = np.exp(peak + calibration.log_bounds[level]) - SLACK_BYTES
            scales = np.array(calibration.log_scales) * (with_slack / amounts)[:, None]
            distribution = distribution.mixed(rows, np.log(amounts), calibration.weights, scales)
            for row in rows.tolist():
                reasons[row] = option_reasons(
                    table, row, calibration.options, "traced jobs were measured with"
                )
        return distribution, reasons


def _startup_peaks(
    expected_bytes: NDArray[np.float64], features: NDArray[np.float64], gpu: PredictionGpu
) -> NDArray[np.float64]:
    """The start-up peak of ``B`` jobs, shape ``[B]``; the steady state where no search exceeds it.

    With ``cudnn.benchmark``, cuDNN tries every algorithm of every convolution in the first step,
    each with its workspace, and PyTorch gives the workspaces back.  The widest search is that of
    the convolution with the largest input and output.  Little else than the weights is on the GPU
    beside it: such a convolution is one of the first, so few tensors are kept yet, and in the
    backward pass most have been freed.  A search takes no more than is free, so it does not exceed
    the memory of the GPU.  Jobs without layers do not say how large their convolutions are.
    """
    searches = features[:, _BENCHMARK] * features[:, _CONVOLUTION]
    peaks = gpu.context.expected_bytes + features[:, _WEIGHTS] + SEARCH_COPIES * searches
    highest: NDArray[np.float64] = np.maximum(
        expected_bytes, np.where(searches > 0, np.minimum(peaks, gpu.available_bytes), 0.0)
    )
    return highest


def _are_numbers(weights: Array, locations: Array, scales: Array, amounts: Array) -> bool:
    """Whether all outputs are finite; a damaged graph can pass the trial run and still output NaN
    for some job."""
    products = np.vdot(weights, locations), np.vdot(scales, scales), np.vdot(amounts, amounts)
    return all(map(math.isfinite, products))


def _whole_bytes(amounts: Array) -> NDArray[np.int64]:
    """Amounts as the nearest integers."""
    whole: NDArray[np.int64] = np.minimum(np.rint(amounts), _MOST_BYTES).astype(np.int64)
    return whole


@lru_cache(maxsize=64)
def _log_edges(bins: BinScheme, shift_bytes: int) -> NDArray[np.float64]:
    """Edges between the bins in log-bytes, as amounts above the context; read-only."""
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
    wanted: dict[str, int | None] = {"features": 2 * len(FEATURE_NAMES)}
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
        "features": (1, 2 * len(FEATURE_NAMES)),
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
