"""The prediction for one job, and the options of a prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.predict.bins import BinScheme

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
