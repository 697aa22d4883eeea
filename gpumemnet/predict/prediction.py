"""Predictions: of one job, and as a table of columns for many; and the options of a prediction.

Probabilities are computed on first access.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import describe
from gpumemnet.predict.distribution import BinScheme, MemoryDistribution
from gpumemnet.predict.gpu_context import PredictionGpu

DEFAULT_COVERAGE: Final = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions:
    """The options of a prediction; they are the keyword arguments of everything that predicts.

    Attributes:
        bins: bin scheme of the probabilities; by default 1 GiB bins up to the capacity of the GPU.
        coverage: share of jobs that the safe bytes cover.
        gpu: name or alias of the GPU; by default the predictor's.
        encoder: ``mlp`` or ``transformer``; by default ``mlp`` where it is loaded.

    Raises:
        InvalidRequestError: when ``coverage`` is not a number.
    """

    bins: BinScheme | None = None
    coverage: float = DEFAULT_COVERAGE
    gpu: str | None = None
    encoder: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.coverage, bool) or not isinstance(self.coverage, int | float):
            raise InvalidRequestError(
                f"must be a number, not {describe(self.coverage)}", "coverage"
            )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """The predicted memory of one job as ``nvidia-smi`` shows it, including the CUDA context.

    Attributes:
        expected_bytes: centre of the predicted distribution: too low about as often as too high.
        startup_peak_bytes: the expected memory at the moment of most memory.  It is above
            ``expected_bytes``, the steady state, where cuDNN searches for algorithms in the first
            step (``cudnn_benchmark``) and gives the memory back.
        safe_bytes: upper bound on the steady state that holds for the share ``coverage`` of jobs.
            It is wider outside the model's support, and ``None`` where nothing is known.
        coverage: the requested coverage.
        bins: the bin scheme of ``probabilities``.
        probabilities: probability of every bin, shape ``[bins.count]``, sums to one.
        in_support: whether the job resembles those that the model was trained and calibrated on.
        reasons: why the job does not resemble them, one sentence each; empty inside the support.
        gpu: the GPU model that the amounts are for.
        gpu_source: why they are for it: ``request``, ``setting``, or ``default``, the GPU of most
            readings that the model learned from.
        context_bytes: the CUDA context in ``expected_bytes``.
        context_source: where that number comes from.
        estimator: name of the estimator.
        version: version of the estimator.
        label_source: origin of the labels that the model learned from.
    """

    expected_bytes: int
    startup_peak_bytes: int
    safe_bytes: int | None
    coverage: float
    bins: BinScheme
    probabilities: NDArray[np.float64]
    in_support: bool
    reasons: tuple[str, ...]
    gpu: str
    gpu_source: str
    context_bytes: int
    context_source: str
    estimator: str
    version: str
    label_source: str

    @property
    def bin_index(self) -> int:
        """Index of the most probable bin."""
        return int(self.probabilities.argmax())

    @property
    def bin_bounds_bytes(self) -> tuple[int, int | None]:
        """Edges of the most probable bin in bytes; the upper edge of the last bin is ``None``."""
        return self.bins.bounds_bytes(self.bin_index)


Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Limits = np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]


class PredictingModel(NamedTuple):
    """The model behind a table of predictions.

    Attributes:
        name, version: of the model's bundle.
        label_source: origin of its labels, as in
            :class:`~gpumemnet.predict.prediction.Prediction`.
        prediction_gpu: the GPU that the amounts are for, with the CUDA context in them.
        bins: the bins of the probabilities: the requested ones, else 1 GiB wide up to the capacity
            of that GPU.
    """

    name: str
    version: str
    label_source: str
    prediction_gpu: PredictionGpu
    bins: BinScheme


class PredictionTable(Sequence[Prediction]):
    """Predictions of ``B`` jobs.

    Attributes:
        model: the model that predicts.
        expected_bytes: centre of each predicted distribution, int64, shape ``[B]``.
        startup_peak_bytes: the expected memory at the moment of most memory, at least
            ``expected_bytes``, int64, shape ``[B]``.
        safe_bytes: upper bounds that hold for the share :attr:`coverage` of jobs, int64, masked
            where there is none, shape ``[B]``.
        coverage: the requested coverage.
    """

    __slots__ = (
        *("_distribution", "_log_edges", "_probabilities", "_reasons", "coverage"),
        *("expected_bytes", "model", "safe_bytes", "startup_peak_bytes"),
    )

    def __init__(
        self,
        model: PredictingModel,
        expected_bytes: Indices,
        safe_bytes: Limits,
        reasons: Mapping[int, tuple[str, ...]],
        coverage: float,
        distribution: MemoryDistribution,
        log_edges: Array,
        startup_peak_bytes: Indices | None = None,
    ) -> None:
        """Builds a table from columns.

        Args:
            model: the model that predicts.
            expected_bytes, safe_bytes: shape ``[B]``.
            reasons: every row outside the support → the reasons.
            coverage: the requested coverage.
            distribution: the distributions of all rows, without the shift of amounts that
                ``log_edges`` contains.
            log_edges: edges between neighbouring bins for ``distribution``, in log-bytes, shape
                ``[bins.count - 1]``.
            startup_peak_bytes: shape ``[B]``; by default ``expected_bytes``.
        """
        self.model = model
        self.expected_bytes = expected_bytes
        self.safe_bytes = safe_bytes
        self.startup_peak_bytes = (
            expected_bytes if startup_peak_bytes is None else startup_peak_bytes
        )
        self.coverage = coverage
        self._reasons = reasons
        self._distribution = distribution
        self._log_edges = log_edges
        self._probabilities: Array | None = None

    @property
    def in_support(self) -> NDArray[np.bool_]:
        """Whether each job resembles those that its model was trained on, shape ``[B]``."""
        inside = np.ones(len(self), dtype=np.bool_)
        inside[list(self._reasons)] = False
        return inside

    def reasons(self, row: int) -> tuple[str, ...]:
        """Why the job in ``row`` lies outside its model's support, one sentence each; empty inside
        the support."""
        return self._reasons.get(row, ())

    @property
    def bin_index(self) -> Indices:
        """Index of the most probable bin of each job; the search starts at the expected bytes."""
        if self._probabilities is not None:
            indices: Indices = self._probabilities.argmax(axis=1)
            return indices
        return self._distribution.most_probable_bins(
            self._log_edges, self.model.bins.index(self.expected_bytes.astype(np.float64))
        )

    @property
    def probabilities(self) -> Array:
        """Probability of every bin, shape ``[B, bins]``."""
        if self._probabilities is None:
            self._probabilities = self._distribution.bin_probabilities(self._log_edges)
        return self._probabilities

    def documents(self) -> list[dict[str, Any]]:
        """The predictions as JSON objects, with the fields that HTTP and ``--json`` have in common;
        HTTP adds its own.

        Objects share their parts, so they must not be changed.
        """
        gpu, bins = self.model.prediction_gpu, self.model.bins
        shared = {
            "gpu": gpu.gpu,
            "gpu_source": gpu.gpu_source,
            "context_bytes": gpu.context.expected_bytes,
            "context_source": gpu.context.source,
            "label_source": self.model.label_source,
            "model": {"name": self.model.name, "version": self.model.version},
        }
        indices = self.probabilities.argmax(axis=1).tolist()
        bounds_bytes = {index: bins.bounds_bytes(index) for index in set(indices)}
        amounts = (
            self.expected_bytes,
            self.startup_peak_bytes,
            self.safe_bytes,
            self.probabilities,
        )
        documents = []
        for row, (expected, startup, safe, in_bins) in enumerate(
            zip(*(column.tolist() for column in amounts), strict=True)
        ):
            index, reasons = indices[row], self._reasons.get(row, ())
            lower_bytes, upper_bytes = bounds_bytes[index]
            documents.append(
                {
                    "expected_bytes": expected,
                    "startup_peak_bytes": startup,
                    "safe_bytes": safe,
                    "coverage": self.coverage,
                    "in_support": not reasons,
                    "reasons": list(reasons),
                    "bin": {
                        "index": index,
                        "lower_bytes": lower_bytes,
                        "upper_bytes": upper_bytes,
                        "probability": in_bins[index],
                    },
                    "bins": {
                        "name": bins.name,
                        "width_bytes": bins.width_bytes,
                        "count": bins.count,
                        "probabilities": in_bins,
                    },
                    **shared,
                }
            )
        return documents

    def __len__(self) -> int:
        return len(self.expected_bytes)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prediction]: ...

    def __getitem__(self, index: int | slice) -> Prediction | list[Prediction]:
        """One prediction for an index, a list of predictions for a slice."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return self._prediction(
            row,
            int(self.expected_bytes[row]),
            int(self.startup_peak_bytes[row]),
            self.safe_bytes[row : row + 1].tolist()[0],
        )

    def __iter__(self) -> Iterator[Prediction]:
        amounts = (self.expected_bytes, self.startup_peak_bytes, self.safe_bytes)
        return map(self._prediction, range(len(self)), *(column.tolist() for column in amounts))

    def _prediction(
        self, row: int, expected_bytes: int, startup_peak_bytes: int, safe_bytes: int | None
    ) -> Prediction:
        model, reasons = self.model, self._reasons.get(row, ())
        gpu = model.prediction_gpu
        return Prediction(
            expected_bytes=expected_bytes,
            startup_peak_bytes=startup_peak_bytes,
            safe_bytes=safe_bytes,
            coverage=self.coverage,
            bins=model.bins,
            probabilities=self.probabilities[row],
            in_support=not reasons,
            reasons=reasons,
            gpu=gpu.gpu,
            gpu_source=gpu.gpu_source,
            context_bytes=gpu.context.expected_bytes,
            context_source=gpu.context.source,
            estimator=model.name,
            version=model.version,
            label_source=model.label_source,
        )


class Estimator(Protocol):
    """Interface of everything that predicts the memory of jobs."""

    def predict_table(
        self, jobs: JobTable, *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE
    ) -> PredictionTable:
        """Returns one prediction per job, in order.

        Raises:
            InvalidRequestError: when the estimator does not offer the coverage.
            UnsupportedJobError: when the estimator does not support a job's family.
        """
        ...
