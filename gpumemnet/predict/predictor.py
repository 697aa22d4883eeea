"""Predicts the memory of jobs in process, from bundles; needs numpy and onnxruntime, not torch.

A predictor has one bundle for each encoder, which answers for all jobs: from a table of jobs through
its ONNX graph to predictions, for any GPU.  The result is a
:class:`~gpumemnet.predict.prediction.PredictionTable`.  A predictor is immutable, so threads may
share it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import (
    BundleError,
    FieldError,
    InvalidJobError,
    InvalidRequestError,
    UnsupportedJobError,
)
from gpumemnet.gpu import GENERIC_BLAS_WORKSPACE_BYTES, MAX_CONTEXT_MIB, device_profile
from gpumemnet.job.job_table import Array, Flags, Indices, JobTable
from gpumemnet.job.json_codec import ReadJobs
from gpumemnet.job.layers import check_choice, check_count, describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.replicas import added_by_replicas
from gpumemnet.predict.bundle import (
    GRAPH_OUTPUTS,
    Bundle,
    load_bundles,
    load_session,
)
from gpumemnet.predict.bundle_card import ENCODERS, SiteCalibration
from gpumemnet.predict.distribution import (
    MOST_LOG_BYTES,
    BinScheme,
    MemoryDistribution,
    bins_of_width,
)
from gpumemnet.predict.features import (
    FEATURE_NAMES,
    feature_matrix,
    layer_sequence,
    model_features,
)
from gpumemnet.predict.prediction import (
    DEFAULT,
    REQUEST,
    SETTING,
    PredictingModel,
    Prediction,
    PredictionGpu,
    PredictionOptions,
    PredictionTable,
    prediction_gpu,
)
from gpumemnet.predict.support import Support, option_reasons
from gpumemnet.units import GIB, MIB

Floats = NDArray[np.floating[Any]]

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
_BENCHMARK, _HAS_LAYERS, _CONVOLUTIONS, _GRADIENTS = map(
    FEATURE_NAMES.index, ("is_cudnn_benchmark", "has_layers", "conv_count", "gradient_bytes")
)
_MOST_BYTES: Final = 2.0**62
"""Upper limit of an amount, so that it fits a 64-bit integer."""


class GraphOutput(NamedTuple):
    """Output of a bundle's graph for ``B`` jobs; all amounts are above the CUDA context.

    Attributes:
        distribution: the distributions.
        expected_bytes: the expected memory, shape ``[B]``.
        bounds_bytes: the bounds for the ``L`` calibrated coverages, shape ``[B, L]``.
        is_broken: jobs with infinity or NaN in the output, whose amounts are set to 1 TiB, shape
            ``[B]``.
    """

    distribution: MemoryDistribution
    expected_bytes: Array
    bounds_bytes: Array
    is_broken: Flags


class ModelGpu(NamedTuple):
    """The GPU that a prediction is for, as one model sees it.

    Attributes:
        prediction_gpu: the GPU, with the CUDA context that the answer contains.
        shift_bytes: what the graph's expectation is moved by: the context.
        shift_bound_bytes: what the graph's bounds are moved by: the upper bound of the context.
        site: a site's calibration for this GPU, which then gives both shifts; ``None`` for the
            model as trained.
    """

    prediction_gpu: PredictionGpu
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
        self.model_gpu = cache(self._model_gpu)
        self._rows_at_once = _ROWS_AT_ONCE[bundle.card.encoder]
        self._session = load_session(bundle)

    def _model_gpu(self, prediction_gpu: PredictionGpu) -> ModelGpu:
        """Returns the GPU as this model sees it."""
        site = self.card.site_calibration
        if site is not None and site.gpu == prediction_gpu.gpu:
            return ModelGpu(prediction_gpu, site.shift_bytes, site.shift_bound_bytes, site)
        context = prediction_gpu.context
        return ModelGpu(prediction_gpu, context.expected_bytes, context.bound_bytes)

    def run(self, table: JobTable, features: Array) -> GraphOutput:
        """Runs the graph for ``B`` jobs with their :meth:`features`."""
        step = self._rows_at_once
        parts = [
            self._run(
                table[at : at + step] if self.needs_layers else table, features[at : at + step]
            )
            for at in range(0, max(len(features), 1), step)
        ]
        outputs = [*map(np.concatenate, zip(*parts, strict=True))]
        weights, locations, scales, amounts = outputs
        # A damaged graph can pass the trial run and still output NaN for some job.
        is_number = [np.isfinite(output).all(axis=1) for output in outputs]
        is_broken = ~np.logical_and.reduce(is_number)
        amounts = np.where(is_broken[:, None], math.log(1024.0 * GIB), amounts)
        amounts_bytes = np.exp(np.minimum(amounts, MOST_LOG_BYTES, dtype=np.float64))
        return GraphOutput(
            MemoryDistribution(weights, locations, scales),
            amounts_bytes[:, 1],
            np.minimum(amounts_bytes[:, 2:], _MOST_BYTES),
            is_broken,
        )

    def _run(self, table: JobTable, features: Array) -> list[Any]:
        inputs: dict[str, Any] = {"features": features.astype(np.float32)}
        if self.needs_layers:
            sequences, mask = layer_sequence(table)
            inputs |= {"sequences": sequences, "mask": mask.astype(np.float32)}
        return self._session.run(GRAPH_OUTPUTS, inputs)

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

    def features(self, table: JobTable, model_gpu: ModelGpu) -> Array:
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
        distribution, expected, bounds, is_broken = self.run(table, features)
        safe = bounds[:, level] if site is None else site.bounds(expected, bounds)[:, level]
        reasons = {row: unseen.reasons(row) for row in unseen.counts.nonzero()[0].tolist()}
        is_unbounded = unseen.is_unknown | is_broken
        if reasons:
            is_outside = unseen.counts > 0
            wider = safe * math.exp(self.card.widenings[level])
            stretch = np.log(wider / expected) / np.maximum(np.log(safe / expected), 1e-3)
            distribution = distribution.widened(np.where(is_outside, np.maximum(stretch, 1.0), 1.0))
            safe = np.where(is_outside, wider, safe)
        reasons |= {
            row: (*reasons.get(row, ()), NO_NUMBER) for row in is_broken.nonzero()[0].tolist()
        }
        traced = table.column("traced_peak_bytes") if self.card.traced_peaks else None
        if traced is not None and traced.any():
            distribution, by_trace = self._with_traces(
                table, traced, distribution, expected, safe, level
            )
            for row, words in by_trace.items():
                is_unbounded[row] = bool(words)
            reasons = {row: words for row, words in (reasons | by_trace).items() if words}
        shift, safe = model_gpu.shift_bytes, safe + model_gpu.shift_bound_bytes
        least = (0 if site else shift) + features[:, CERTAIN_COLUMNS].sum(axis=1)
        missing = np.maximum(least - (expected + shift), 0.0)
        if missing.any():
            distribution = distribution.moved(missing)
        expected = expected + missing + shift
        safe = np.maximum(safe, expected)
        if (table.column("ranks") > 1).any():
            gradients = features[:, _GRADIENTS]
            buckets = gradients if traced is None else gradients * (traced == 0)
            added, most = added_by_replicas(table.column("ranks"), buckets)
            distribution = distribution.moved(added)
            expected, safe = expected + added, safe + most
        gpu = model_gpu.prediction_gpu
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
            _searches(features),
        )

    def _with_traces(
        self,
        table: JobTable,
        traced: Array,
        distribution: MemoryDistribution,
        expected: Array,
        safe: Array,
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


def _searches(features: Array) -> Flags:
    """Whether cuDNN searches for algorithms in the first step of each of ``B`` jobs, shape ``[B]``.
    Jobs without layers may have convolutions.

    A search tries algorithms whose workspaces depend on cuDNN's version and on the shapes of
    filters, which jobs do not state.
    """
    may_convolve = (features[:, _CONVOLUTIONS] > 0) | (features[:, _HAS_LAYERS] == 0)
    return (features[:, _BENCHMARK] > 0) & may_convolve


def _whole_bytes(amounts: Floats) -> Indices:
    """Amounts as the nearest integers."""
    return np.minimum(np.rint(amounts), _MOST_BYTES).astype(np.int64)


@lru_cache(maxsize=64)
def _log_edges(bins: BinScheme, shift_bytes: int) -> Array:
    """Edges between the bins in log-bytes, as amounts above the context; read-only."""
    log_edges = bins.log_inner_edges
    if shift_bytes:
        log_edges = np.log(np.maximum(np.exp(log_edges) - shift_bytes, 1.0))
    log_edges.flags.writeable = False
    return log_edges


@lru_cache(maxsize=256)
def _gib_bins(capacity_bytes: int) -> BinScheme:
    return bins_of_width(GIB, capacity_bytes)


class Predictor:
    """Predicts the memory of jobs of the families that its bundles cover.

    Args:
        bundles: the bundles; a later one replaces an earlier one with the same encoder.
        gpu: the GPU that answers are for where none is asked for; by default that of the first
            bundle's card.
        context_bytes: the CUDA context of the site; by default what
            :func:`~gpumemnet.predict.prediction.prediction_gpu` finds.

    Raises:
        BundleError: when there is no bundle, two bundles have the same name, or a graph does not
            run.
        InvalidRequestError: when the GPU is unknown or the context impossible.
    """

    def __init__(
        self,
        bundles: Iterable[Bundle],
        *,
        gpu: str | None = None,
        context_bytes: int | None = None,
    ) -> None:
        chosen = {bundle.card.encoder: bundle for bundle in bundles}
        if not chosen:
            raise BundleError(
                "no bundle to predict with: give a bundle folder, or install the package with its own"
            )
        names = [bundle.card.name for bundle in chosen.values()]
        if len(set(names)) < len(names):
            raise BundleError(
                f"two bundles are called {names[0]}: give each model a name of its own"
            )
        self._models: dict[str, BundleModel] = {
            encoder: BundleModel(chosen[encoder]) for encoder in ENCODERS if encoder in chosen
        }
        if context_bytes is not None:
            check_count(context_bytes, "context_bytes", 1, MAX_CONTEXT_MIB * MIB)
        cards = [bundle.card for bundle in self.bundles]
        # The same object for the same GPU, so that what is computed for it can be kept.
        self._gpu = cache(partial(prediction_gpu, cards, context_bytes))
        named = (cards[0].gpu, DEFAULT) if gpu is None else (gpu, SETTING)
        self._default = self._gpu(device_profile(named[0]), named[1])

    @classmethod
    def default(cls, **settings: Any) -> Predictor:
        """Creates a predictor with the bundles shipped in the package; the settings are those of
        the class."""
        return cls.load(**settings)

    @classmethod
    def load(cls, *folders: str | Path, **settings: Any) -> Predictor:
        """Creates a predictor with the bundles in ``folders``, or in their folders, or with the
        shipped ones if none is given; the settings are those of the class."""
        return cls(load_bundles(*folders), **settings)

    def prediction_gpu(self, gpu: str | None) -> PredictionGpu:
        """The GPU called ``gpu``, with the context that predictions for it contain; by default the
        predictor's.

        Raises:
            InvalidRequestError: when neither the catalogue nor a bundle knows it.
        """
        return self._default if gpu is None else self._gpu(device_profile(gpu), REQUEST)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles in use."""
        return tuple(model.bundle for model in self._models.values())

    def model(self, encoder: str | None = None) -> BundleModel:
        """The model with an encoder; by default ``mlp`` where it is loaded.

        Raises:
            InvalidRequestError: when no model has that encoder.
        """
        encoder = encoder or next(iter(self._models))
        return self._models[check_choice(encoder, self._models, "encoder")]

    def refusals(self, table: JobTable, encoder: str | None = None) -> dict[int, FieldError]:
        """Every row that the model cannot predict → the error: a family that it has not learned,
        missing layers, an impossible traced peak.

        Raises:
            InvalidRequestError: when no model has that encoder.
        """
        model, refused = self.model(encoder), _impossible_peaks(table)
        families = table.options("family")
        unknown = [family not in model.card.families for family in families]
        if model.needs_layers:
            refused |= {
                row: InvalidRequestError(
                    "'transformer' needs `layers`; send them, or use 'mlp'", "encoder"
                )
                for row in (table.layer_counts == 0).nonzero()[0].tolist()
            }
        if any(unknown):
            refused |= {
                row: UnsupportedJobError(
                    f"no model for {families[table.option_codes[row]]} jobs is loaded: there is one for "
                    f"{', '.join(model.card.families)}",
                    "family",
                )
                for row in np.array(unknown)[table.option_codes].nonzero()[0].tolist()
            }
        return refused

    def accepted(self, read: ReadJobs, encoder: str | None) -> ReadJobs:
        """The jobs that the model predicts; the others are among the errors.

        Raises:
            InvalidRequestError: when no model has that encoder.
        """
        refusals = self.refusals(read.table, encoder)
        if not refusals:
            return read
        rows = np.setdiff1d(np.arange(len(read.table)), list(refusals), assume_unique=True)
        errors = {int(read.rows[at]): error for at, error in refusals.items()}
        return ReadJobs(read.table.take(rows), read.rows[rows], read.errors | errors)

    def predict(self, job: TrainingJob, **options: Any) -> Prediction:
        """Predicts the memory of one job.

        Args:
            job: the job.
            options: see :class:`~gpumemnet.predict.prediction.PredictionOptions`.

        Raises:
            InvalidRequestError: when the bundle is not calibrated for the coverage, or the GPU or
                encoder is unknown.
            UnsupportedJobError: when no bundle is loaded for the job's family.
        """
        return self.predict_table(JobTable.from_jobs((job,)), **options)[0]

    def predict_many(self, jobs: Sequence[TrainingJob], **options: Any) -> PredictionTable:
        """Predicts the memory of several jobs, in order; options and errors as in
        :meth:`predict`."""
        return self.predict_table(JobTable.from_jobs(jobs), **options)

    def predict_table(
        self, jobs: JobTable, options: PredictionOptions | None = None, **keywords: Any
    ) -> PredictionTable:
        """Predicts the memory of all jobs of a table, in order, in batches; errors as in
        :meth:`predict`.

        Args:
            jobs: the jobs.
            options: the options; by default those given as keyword arguments.
            keywords: see :class:`~gpumemnet.predict.prediction.PredictionOptions`.
        """
        if options is None:
            options = PredictionOptions(**keywords)
        model = self.model(options.encoder)
        for error in self.refusals(jobs, options.encoder).values():
            raise error
        model_gpu = model.model_gpu(self.prediction_gpu(options.gpu))
        return model.predict(jobs, options.bins, options.coverage, model_gpu)


def _impossible_peaks(table: JobTable) -> dict[int, FieldError]:
    """Every row whose traced peak is below what its training step holds for sure → the error."""
    peaks = table.column("traced_peak_bytes")
    rows = peaks.nonzero()[0]
    if not len(rows):
        return {}
    least = feature_matrix(table.take(rows), GENERIC_BLAS_WORKSPACE_BYTES)[:, CERTAIN_COLUMNS].sum(
        axis=1
    )
    return {
        row: InvalidJobError(
            f"is {peak:,} bytes, below the {math.floor(amount):,} bytes of parameters, gradients and optimizer state: give the "
            "reserved bytes that gpumemnet trace reports, in bytes",
            "traced_peak_bytes",
        )
        for row, peak, amount in zip(
            rows.tolist(), peaks[rows].astype(np.int64).tolist(), least.tolist(), strict=True
        )
        if peak < amount
    }
