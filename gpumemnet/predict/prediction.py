"""Predictions: of one job, and as a table of columns for many; and the options of a prediction.

One model predicts each job; different jobs of a table may have different models.  Probabilities are
computed on first access.
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
        encoder: ``mlp`` or ``transformer`` for a model of the family, ``common`` for the model of
            all families; by default ``mlp`` if the family has it.

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
        safe_bytes: upper bound on the steady state that holds for the share ``coverage`` of jobs;
            ``None`` outside the model's support.
        coverage: the requested coverage.
        bins: the bin scheme of ``probabilities``.
        probabilities: probability of every bin, shape ``[bins.count]``, sums to one.
        in_support: whether the job resembles those that the model was trained and calibrated on.
        reasons: why the job does not resemble them, one sentence each; empty inside the support.
        gpu: the GPU model that the amounts are for.
        gpu_source: why they are for it: ``request``, ``setting``, or ``default``, the GPU of the
            most trusted labels.
        context_bytes: the CUDA context in ``expected_bytes``.
        context_source: where that number comes from.
        estimator: name of the estimator.
        version: version of the estimator.
        label_source: origin of the labels behind the answer: readings of a GPU (``nvml_…``,
            ``nvidia_smi_…``), ``traced``, or ``readings_and_traces`` where the line over the closed
            form answers.
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


class PredictingModel(NamedTuple):
    """The model that predicts some rows.

    Attributes:
        name, version: of the model's bundle.
        label_source: origin of the labels behind these answers, as in
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

    @property
    def gpu(self) -> str:
        """Name of the GPU."""
        return self.prediction_gpu.gpu


@dataclass(slots=True, eq=False)
class ModelDistributions:
    """The distributions that one model predicts.

    Attributes:
        model: the model.
        rows: the rows of the table that it predicts, increasing, shape ``[R]``.
        distribution: the distributions of these rows, without the shift of amounts that
            ``log_edges`` contains.
        log_edges: edges between neighbouring bins for ``distribution``, in log-bytes, shape
            ``[bins.count - 1]``.
    """

    model: PredictingModel
    rows: Indices
    distribution: MemoryDistribution
    log_edges: Array
    _probabilities: Array | None = None

    @property
    def probabilities(self) -> Array:
        """Probability of every bin, shape ``[R, bins.count]``."""
        if self._probabilities is None:
            self._probabilities = self.distribution.bin_probabilities(self.log_edges)
        return self._probabilities

    def bin_index(self, expected_bytes: Indices) -> Indices:
        """Index of the most probable bin of each row; the search starts at the bin of
        ``expected_bytes``."""
        if self._probabilities is not None:
            indices: Indices = self._probabilities.argmax(axis=1)
            return indices
        return self.distribution.most_probable_bins(
            self.log_edges, self.model.bins.index(expected_bytes.astype(np.float64))
        )


class PredictionTable(Sequence[Prediction]):
    """Predictions of ``B`` jobs.

    Attributes:
        expected_bytes: centre of each predicted distribution, int64, shape ``[B]``.
        startup_peak_bytes: the expected memory at the moment of most memory, at least
            ``expected_bytes``, int64, shape ``[B]``.
        coverage: the requested coverage.
        answers: each model with its rows and distributions.
    """

    __slots__ = (
        "_positions",
        "_reasons",
        "_safe_bytes",
        "by_model",
        "coverage",
        "expected_bytes",
        "startup_peak_bytes",
    )

    def __init__(
        self,
        expected_bytes: Indices,
        safe_bytes: Indices,
        reasons: Mapping[int, tuple[str, ...]],
        coverage: float,
        by_model: Sequence[ModelDistributions],
        startup_peak_bytes: Indices | None = None,
    ) -> None:
        """Builds a table from columns.

        Args:
            expected_bytes: shape ``[B]``.
            safe_bytes: shape ``[B]``; values of rows outside the support are ignored.
            reasons: every row outside the support → the reasons.
            coverage: the requested coverage.
            by_model: the models with their distributions; every row is in exactly one of them.
            startup_peak_bytes: shape ``[B]``; by default ``expected_bytes``.
        """
        self.expected_bytes = expected_bytes
        self.startup_peak_bytes = (
            expected_bytes if startup_peak_bytes is None else startup_peak_bytes
        )
        self.coverage = coverage
        self.by_model = tuple(by_model)
        self._safe_bytes = safe_bytes
        self._reasons = reasons
        self._positions: tuple[Indices, Indices] | None = None

    @staticmethod
    def join(
        parts: Sequence[tuple[Indices, PredictionTable]], count: int, coverage: float
    ) -> PredictionTable:
        """Joins tables into one of ``count`` rows; each part is its rows in the result, and their
        predictions in that order."""
        expected, startup, safe = np.zeros((3, count), dtype=np.int64)
        reasons: dict[int, tuple[str, ...]] = {}
        by_model = []
        for rows, table in parts:
            expected[rows] = table.expected_bytes
            startup[rows] = table.startup_peak_bytes
            safe[rows] = table._safe_bytes
            reasons |= {int(rows[row]): words for row, words in table._reasons.items()}
            by_model += [
                ModelDistributions(part.model, rows[part.rows], part.distribution, part.log_edges)
                for part in table.by_model
            ]
        return PredictionTable(expected, safe, reasons, coverage, by_model, startup)

    @property
    def models(self) -> tuple[PredictingModel, ...]:
        """The models that predict at least one row; :attr:`model_index` assigns them to rows."""
        return tuple(part.model for part in self.by_model)

    @property
    def model_index(self) -> Indices:
        """Position in :attr:`models` of the model that predicts each row, shape ``[B]``."""
        return self._rows_in_answers()[0]

    @property
    def in_support(self) -> NDArray[np.bool_]:
        """Whether each job resembles those that its model was trained on, shape ``[B]``."""
        inside = np.ones(len(self), dtype=np.bool_)
        inside[list(self._reasons)] = False
        return inside

    @property
    def safe_bytes(self) -> np.ma.MaskedArray[tuple[int], np.dtype[np.int64]]:
        """Upper bounds that hold for the share :attr:`coverage` of jobs, int64, masked outside the
        support, shape ``[B]``."""
        return np.ma.MaskedArray(self._safe_bytes, mask=~self.in_support)

    def reasons(self, row: int) -> tuple[str, ...]:
        """Why the job in ``row`` lies outside its model's support, one sentence each; empty inside
        the support."""
        return self._reasons.get(row, ())

    @property
    def bin_index(self) -> Indices:
        """Index of the most probable bin of each job, shape ``[B]``."""
        index = np.zeros(len(self), dtype=np.int64)
        for part in self.by_model:
            index[part.rows] = part.bin_index(self.expected_bytes[part.rows])
        return index

    @property
    def probabilities(self) -> Array:
        """Probability of every bin, shape ``[B, bins]``; rows whose model has fewer bins are padded
        with zeros."""
        if len(self.by_model) == 1:
            return self.by_model[0].probabilities
        width = max((part.model.bins.count for part in self.by_model), default=0)
        probabilities = np.zeros((len(self), width))
        for part in self.by_model:
            probabilities[part.rows, : part.model.bins.count] = part.probabilities
        return probabilities

    def documents(self) -> list[dict[str, Any]]:
        """The predictions as JSON objects, with the fields that HTTP and ``--json`` have in common;
        HTTP adds its own.

        Objects share their parts, so they must not be changed.
        """
        documents: list[dict[str, Any]] = [{}] * len(self)
        expected_bytes, safe_bytes = self.expected_bytes.tolist(), self._safe_bytes.tolist()
        startup_peak_bytes = self.startup_peak_bytes.tolist()
        for part in self.by_model:
            bins, model = (
                part.model.bins,
                {"name": part.model.name, "version": part.model.version},
            )
            probabilities = part.probabilities
            indices = probabilities.argmax(axis=1).tolist()
            bounds_bytes = {index: bins.bounds_bytes(index) for index in set(indices)}
            for row, index, in_bins in zip(
                part.rows.tolist(), indices, probabilities.tolist(), strict=True
            ):
                expected, reasons = expected_bytes[row], self._reasons.get(row, ())
                safe = None if reasons else safe_bytes[row]
                lower_bytes, upper_bytes = bounds_bytes[index]
                documents[row] = {
                    "expected_bytes": expected,
                    "startup_peak_bytes": startup_peak_bytes[row],
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
                    "gpu": part.model.gpu,
                    "gpu_source": part.model.prediction_gpu.gpu_source,
                    "context_bytes": part.model.prediction_gpu.context.expected_bytes,
                    "context_source": part.model.prediction_gpu.context.source,
                    "label_source": part.model.label_source,
                    "model": model,
                }
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
            int(self._safe_bytes[row]),
        )

    def __iter__(self) -> Iterator[Prediction]:
        amounts = (self.expected_bytes, self.startup_peak_bytes, self._safe_bytes)
        return map(self._prediction, range(len(self)), *(column.tolist() for column in amounts))

    def _prediction(
        self, row: int, expected_bytes: int, startup_peak_bytes: int, safe_bytes: int
    ) -> Prediction:
        part, position = self.by_model[0], row
        if len(self.by_model) > 1:
            which, positions = self._rows_in_answers()
            part, position = self.by_model[which[row]], int(positions[row])
        model, reasons = part.model, self._reasons.get(row, ())
        return Prediction(
            expected_bytes=expected_bytes,
            startup_peak_bytes=startup_peak_bytes,
            safe_bytes=None if reasons else safe_bytes,
            coverage=self.coverage,
            bins=model.bins,
            probabilities=part.probabilities[position],
            in_support=not reasons,
            reasons=reasons,
            gpu=model.gpu,
            gpu_source=model.prediction_gpu.gpu_source,
            context_bytes=model.prediction_gpu.context.expected_bytes,
            context_source=model.prediction_gpu.context.source,
            estimator=model.name,
            version=model.version,
            label_source=model.label_source,
        )

    def _rows_in_answers(self) -> tuple[Indices, Indices]:
        """For each row, the position of its part and its position in that part, both of shape
        ``[B]``."""
        if self._positions is None:
            which, positions = np.zeros((2, len(self)), dtype=np.int64)
            for number, part in enumerate(self.by_model):
                which[part.rows] = number
                positions[part.rows] = np.arange(len(part.rows))
            self._positions = which, positions
        return self._positions


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
