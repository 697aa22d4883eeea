"""The prediction table: predictions for ``B`` jobs as columns, in the order of the jobs.

One model predicts each job; different jobs of a table may have different models.  Probabilities are
computed on first access.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from gpumemnet.predict.answer_gpu import AnswerGpu
from gpumemnet.predict.bins import BinScheme
from gpumemnet.predict.distribution import MemoryDistribution
from gpumemnet.predict.prediction import Prediction
from gpumemnet.units import ceil_mib

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class AnsweringModel(NamedTuple):
    """The model that predicts some rows.

    Attributes:
        name, version: of the model's bundle.
        label_source: origin of the labels behind these answers, as in
            :class:`~gpumemnet.predict.prediction.Prediction`.
        answer_gpu: the GPU that the amounts are for, with the CUDA context in them.
        bins: the bins of the probabilities: the requested ones, else 1 GiB wide up to the capacity
            of that GPU.
    """

    name: str
    version: str
    label_source: str
    answer_gpu: AnswerGpu
    bins: BinScheme

    @property
    def gpu(self) -> str:
        """Name of the GPU."""
        return self.answer_gpu.gpu


@dataclass(slots=True, eq=False)
class ModelAnswer:
    """The distributions that one model predicts.

    Attributes:
        model: the model.
        rows: the rows of the table that it predicts, increasing, shape ``[R]``.
        distribution: the distributions of these rows, without the shift of amounts that
            ``log_edges`` contains.
        log_edges: edges between neighbouring bins for ``distribution``, in log-bytes, shape
            ``[bins.count - 1]``.
    """

    model: AnsweringModel
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
        "answers",
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
        answers: Sequence[ModelAnswer],
        startup_peak_bytes: Indices | None = None,
    ) -> None:
        """Builds a table from columns.

        Args:
            expected_bytes: shape ``[B]``.
            safe_bytes: shape ``[B]``; values of rows outside the support are ignored.
            reasons: every row outside the support → the reasons.
            coverage: the requested coverage.
            answers: the models' answers; every row is in exactly one of them.
            startup_peak_bytes: shape ``[B]``; by default ``expected_bytes``.
        """
        self.expected_bytes = expected_bytes
        self.startup_peak_bytes = (
            expected_bytes if startup_peak_bytes is None else startup_peak_bytes
        )
        self.coverage = coverage
        self.answers = tuple(answers)
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
        answers = []
        for rows, table in parts:
            expected[rows] = table.expected_bytes
            startup[rows] = table.startup_peak_bytes
            safe[rows] = table._safe_bytes
            reasons |= {int(rows[row]): words for row, words in table._reasons.items()}
            answers += [
                ModelAnswer(answer.model, rows[answer.rows], answer.distribution, answer.log_edges)
                for answer in table.answers
            ]
        return PredictionTable(expected, safe, reasons, coverage, answers, startup)

    @property
    def models(self) -> tuple[AnsweringModel, ...]:
        """The models that predict at least one row; :attr:`model_index` assigns them to rows."""
        return tuple(answer.model for answer in self.answers)

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
        for answer in self.answers:
            index[answer.rows] = answer.bin_index(self.expected_bytes[answer.rows])
        return index

    @property
    def probabilities(self) -> Array:
        """Probability of every bin, shape ``[B, bins]``; rows whose model has fewer bins are padded
        with zeros."""
        if len(self.answers) == 1:
            return self.answers[0].probabilities
        width = max((answer.model.bins.count for answer in self.answers), default=0)
        probabilities = np.zeros((len(self), width))
        for answer in self.answers:
            probabilities[answer.rows, : answer.model.bins.count] = answer.probabilities
        return probabilities

    def documents(self) -> list[dict[str, Any]]:
        """The predictions as JSON objects, with the fields that HTTP and ``--json`` have in common;
        HTTP adds its own.

        ``request_mib`` and ``limit_mib`` are for schedulers: the expected and the safe bytes in
        MiB, rounded up.  Objects share their parts, so they must not be changed.
        """
        documents: list[dict[str, Any]] = [{}] * len(self)
        expected_bytes, safe_bytes = self.expected_bytes.tolist(), self._safe_bytes.tolist()
        startup_peak_bytes = self.startup_peak_bytes.tolist()
        for answer in self.answers:
            bins, model = (
                answer.model.bins,
                {"name": answer.model.name, "version": answer.model.version},
            )
            probabilities = answer.probabilities
            indices = probabilities.argmax(axis=1).tolist()
            bounds_bytes = {index: bins.bounds_bytes(index) for index in set(indices)}
            for row, index, in_bins in zip(
                answer.rows.tolist(), indices, probabilities.tolist(), strict=True
            ):
                expected, reasons = expected_bytes[row], self._reasons.get(row, ())
                safe = None if reasons else safe_bytes[row]
                lower_bytes, upper_bytes = bounds_bytes[index]
                documents[row] = {
                    "request_mib": ceil_mib(expected),
                    "limit_mib": None if safe is None else ceil_mib(safe),
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
                    "gpu": answer.model.gpu,
                    "gpu_source": answer.model.answer_gpu.gpu_source,
                    "context_bytes": answer.model.answer_gpu.context.expected_bytes,
                    "context_source": answer.model.answer_gpu.context.source,
                    "label_source": answer.model.label_source,
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
        answer, position = self.answers[0], row
        if len(self.answers) > 1:
            which, positions = self._rows_in_answers()
            answer, position = self.answers[which[row]], int(positions[row])
        model, reasons = answer.model, self._reasons.get(row, ())
        return Prediction(
            expected_bytes=expected_bytes,
            startup_peak_bytes=startup_peak_bytes,
            safe_bytes=None if reasons else safe_bytes,
            coverage=self.coverage,
            bins=model.bins,
            probabilities=answer.probabilities[position],
            in_support=not reasons,
            reasons=reasons,
            gpu=model.gpu,
            gpu_source=model.answer_gpu.gpu_source,
            context_bytes=model.answer_gpu.context.expected_bytes,
            context_source=model.answer_gpu.context.source,
            estimator=model.name,
            version=model.version,
            label_source=model.label_source,
        )

    def _rows_in_answers(self) -> tuple[Indices, Indices]:
        """For each row, the position of its answer and its position in that answer, both of shape
        ``[B]``."""
        if self._positions is None:
            which, positions = np.zeros((2, len(self)), dtype=np.int64)
            for number, answer in enumerate(self.answers):
                which[answer.rows] = number
                positions[answer.rows] = np.arange(len(answer.rows))
            self._positions = which, positions
        return self._positions
