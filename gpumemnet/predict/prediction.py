"""Predictions: of one job, and as a table of columns for many; the options of a prediction, and the
GPU that it is for.

Probabilities are computed on first access.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, overload

import numpy as np

from gpumemnet.atomic_files import Document
from gpumemnet.gpu import (
    ContextEstimate,
    DeviceProfile,
    available_mib,
    context,
    grown_context,
)
from gpumemnet.job.job_table import Array, Flags, Indices
from gpumemnet.predict.bundle_card import BundleCard
from gpumemnet.predict.distribution import BinScheme, MemoryDistribution
from gpumemnet.units import MIB

DEFAULT_COVERAGE: Final = 0.99
REQUEST: Final = "request"
SETTING: Final = "setting"
DEFAULT: Final = "default"
"""Why an answer is for its GPU: it was asked for, it is the setting, or it is the GPU of the most
trusted labels."""
OF_THE_SITE: Final = ("observed", "measured")
"""Provenances of labels whose context was read on the GPU by whoever uses it."""


@dataclass(frozen=True, slots=True, eq=False)
class PredictionGpu:
    """The GPU that an answer is for.

    Attributes:
        gpu: product name.
        gpu_source: :data:`REQUEST`, :data:`SETTING` or :data:`DEFAULT`.
        capacity_bytes, blas_workspace_bytes: see :class:`~gpumemnet.gpu.DeviceProfile`.
        available_bytes: the capacity without what the driver keeps, as far as that is known.
        context: the CUDA context in the answer, with its source.
        is_calibrated: whether the site has calibrated the models on this GPU, which then differ
            from one another there.
    """

    gpu: str
    gpu_source: str
    capacity_bytes: int
    available_bytes: int
    blas_workspace_bytes: int
    context: ContextEstimate
    is_calibrated: bool = False


def prediction_gpu(
    cards: Sequence[BundleCard], context_bytes: int | None, device: DeviceProfile, source: str
) -> PredictionGpu:
    """The GPU of an answer, and the CUDA context that the answer contains.

    The context depends on the GPU, its driver and the software, not on the model that answers.  It
    is, the first that is known: what the site has calibrated, what the site has set, what the
    labels measured on this GPU contain, and what the catalogue says.  Published labels do not
    count: their readers may have had another driver.

    Args:
        cards: those of the predictor's bundles, in order.
        context_bytes: the site's CUDA context, on any GPU that the site has not calibrated;
            ``None`` where nothing is stated.
        device: the GPU.
        source: who named it.
    """
    gpu, estimate = device.name, context(device)
    measured = {card.contexts[gpu]: card.name for card in cards if gpu in card.contexts}
    sites = [
        card.site_calibration
        for card in cards
        if card.site_calibration is not None and card.site_calibration.gpu == gpu
    ]
    if found := [one.context_bytes for one in sites if one.context_bytes is not None]:
        estimate = grown_context(max(found), "calibrated at this site (gpumemnet calibrate)")
    elif context_bytes is not None:
        estimate = grown_context(context_bytes, "set by the site (GPUMEMNET_CONTEXT_MIB)")
    elif measured:
        largest = max(measured)  # a context grows with the kernels in use
        estimate = grown_context(
            largest, f"measured: contained in the labels of {measured[largest]}"
        )
    return PredictionGpu(
        gpu,
        source,
        device.capacity_bytes,
        available_mib(device) * MIB,
        device.blas_workspace_bytes,
        estimate,
        bool(sites),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions:
    """The options of a prediction; they are the keyword arguments of everything that predicts.

    Attributes:
        bins: bin scheme of the probabilities; by default 1 GiB bins up to the capacity of the GPU.
        coverage: share of jobs that the safe bytes cover.
        gpu: name or alias of the GPU; by default the predictor's.
        encoder: ``mlp`` or ``transformer``; by default ``mlp`` where it is loaded.
    """

    bins: BinScheme | None = None
    coverage: float = DEFAULT_COVERAGE
    gpu: str | None = None
    encoder: str | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """The predicted memory of one job as ``nvidia-smi`` shows it, including the CUDA context.

    Attributes:
        expected_bytes: centre of the predicted distribution: too low about as often as too high.
        startup_peak_bytes: the expected memory at the moment of most memory, ``expected_bytes``.
            ``None`` where cuDNN searches for algorithms in the first step (``cudnn_benchmark``):
            how much more the search takes before it gives the memory back is not known.
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
    startup_peak_bytes: int | None
    safe_bytes: int | None
    coverage: float
    bins: BinScheme
    probabilities: Array
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


@dataclass(slots=True, eq=False)
class PredictionTable(Sequence[Prediction]):
    """Predictions of ``B`` jobs.

    Attributes:
        model: the model that predicts.
        expected_bytes: centre of each predicted distribution, int64, shape ``[B]``.
        safe_bytes: upper bounds that hold for the share :attr:`coverage` of jobs, int64, masked
            where there is none, shape ``[B]``.
        outside: every row outside the support → the reasons.
        coverage: the requested coverage.
        distribution: the distributions of all rows, without the shift of amounts that ``log_edges``
            contains.
        log_edges: edges between neighbouring bins for ``distribution``, in log-bytes, shape
            ``[bins.count - 1]``.
        searches: whether cuDNN searches for algorithms in the first step, so that nothing is known
            of the start-up peak, shape ``[B]``.
    """

    model: PredictingModel
    expected_bytes: Indices
    safe_bytes: Limits
    outside: Mapping[int, tuple[str, ...]]
    coverage: float
    distribution: MemoryDistribution
    log_edges: Array
    searches: Flags
    _probabilities: Array | None = None

    @property
    def in_support(self) -> Flags:
        """Whether each job resembles those that its model was trained on, shape ``[B]``."""
        inside = np.ones(len(self), dtype=np.bool_)
        inside[list(self.outside)] = False
        return inside

    def reasons(self, row: int) -> tuple[str, ...]:
        """Why the job in ``row`` lies outside its model's support, one sentence each; empty inside
        the support."""
        return self.outside.get(row, ())

    @property
    def bin_index(self) -> Indices:
        """Index of the most probable bin of each job."""
        return self.probabilities.argmax(axis=1)

    @property
    def probabilities(self) -> Array:
        """Probability of every bin, shape ``[B, bins]``."""
        if self._probabilities is None:
            self._probabilities = self.distribution.bin_probabilities(self.log_edges)
        return self._probabilities

    def documents(self) -> list[Document]:
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
        indices = self.bin_index.tolist()
        bounds_bytes = {index: bins.bounds_bytes(index) for index in set(indices)}
        amounts = (
            self.expected_bytes,
            self.searches,
            self.safe_bytes,
            self.probabilities,
        )
        documents = []
        for row, (expected, searches, safe, in_bins) in enumerate(
            zip(*(column.tolist() for column in amounts), strict=True)
        ):
            index, reasons = indices[row], self.outside.get(row, ())
            lower_bytes, upper_bytes = bounds_bytes[index]
            documents.append(
                {
                    "expected_bytes": expected,
                    "startup_peak_bytes": None if searches else expected,
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
        model, reasons = self.model, self.reasons(row)
        gpu, expected_bytes = model.prediction_gpu, int(self.expected_bytes[row])
        return Prediction(
            expected_bytes=expected_bytes,
            startup_peak_bytes=None if self.searches[row] else expected_bytes,
            safe_bytes=self.safe_bytes[row : row + 1].tolist()[0],
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
