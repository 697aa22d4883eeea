"""The output tensors: the columns of a prediction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.prediction_table import AnsweringModel, PredictionTable

from .tensors import Tensor

NO_LIMIT: Final = -1
"""The limit of a job outside the model's support: an integer tensor has no null."""


class PredictedJobs(NamedTuple):
    """Predictions: their ids, the table, and the bundles by name."""

    prediction_ids: Sequence[str]
    predictions: PredictionTable
    bundles: Mapping[str, Bundle]

    def of_models(self, value: Callable[[AnsweringModel], str]) -> list[str]:
        """A property of the model that made each prediction."""
        values = [value(model) for model in self.predictions.models]
        return [values[model] for model in self.predictions.model_index.tolist()]


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor: its name, its data type, how it is made for ``B`` predictions, and its
    meaning."""

    name: str
    datatype: str
    values: Callable[[PredictedJobs], Any]
    meaning: str

    @property
    def shape(self) -> list[int]:
        """The shape in the model's metadata: -1 where the size varies."""
        return [-1, -1] if self.name == "probabilities" else [-1]


OUTPUTS: Final = (
    Output(
        "prediction_id",
        "BYTES",
        lambda results: results.prediction_ids,
        "id of the prediction; observations of the job refer to it",
    ),
    Output(
        "expected_bytes",
        "INT64",
        lambda results: results.predictions.expected_bytes,
        "centre of the prediction: too low about as often as too high",
    ),
    Output(
        "startup_peak_bytes",
        "INT64",
        lambda results: results.predictions.startup_peak_bytes,
        "the expected memory at the moment of most memory; above the expected bytes where cuDNN searches for algorithms",
    ),
    Output(
        "safe_bytes",
        "INT64",
        lambda results: results.predictions.safe_bytes.filled(NO_LIMIT),
        f"upper bound that holds with the coverage; {NO_LIMIT} outside the model's support, where there is none",
    ),
    Output(
        "in_support",
        "BOOL",
        lambda results: results.predictions.in_support,
        "whether the job resembles those that the model was trained on",
    ),
    Output(
        "reasons",
        "BYTES",
        lambda results: [
            "\n".join(results.predictions.reasons(row)) for row in range(len(results.predictions))
        ],
        "why the job does not, one sentence per line; empty inside the support",
    ),
    Output(
        "bin_index",
        "INT32",
        lambda results: results.predictions.bin_index,
        "the most probable bin, from 0",
    ),
    Output(
        "probabilities",
        "FP64",
        lambda results: results.predictions.probabilities,
        "probability of every bin; bin k reaches from k to k + 1 times the parameter bin_width_mib, and the last is open above",
    ),
    Output(
        "gpu",
        "BYTES",
        lambda results: results.of_models(lambda model: model.gpu),
        "the GPU model that the amounts are for",
    ),
    Output(
        "model",
        "BYTES",
        lambda results: results.of_models(lambda model: model.name),
        "the bundle that made the prediction",
    ),
    Output(
        "model_version",
        "BYTES",
        lambda results: results.of_models(lambda model: model.version),
        "its version",
    ),
    Output(
        "model_sha256",
        "BYTES",
        lambda results: results.of_models(lambda model: results.bundles[model.name].sha256),
        "the hash over its files",
    ),
)
"""All outputs of every model, in the order of the metadata."""

OUTPUT_NAMES: Final = tuple(output.name for output in OUTPUTS)
_NUMPY_TYPES: Final[Mapping[str, Any]] = {
    "INT64": np.int64,
    "INT32": np.int32,
    "BOOL": np.bool_,
    "FP64": np.float64,
}


def output_tensors(results: PredictedJobs, names: Collection[str]) -> dict[str, Tensor]:
    """The output tensors with the names in ``names``."""
    return {output.name: _tensor(output, results) for output in OUTPUTS if output.name in names}


def _tensor(output: Output, results: PredictedJobs) -> Tensor:
    values = output.values(results)
    if output.datatype != "BYTES":
        values = np.ascontiguousarray(values, dtype=_NUMPY_TYPES[output.datatype])
    return Tensor(output.name, output.datatype, values)
