"""The output tensors: what a prediction says, column by column."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.prediction import Prediction

from .tensors import Tensor

NO_LIMIT: Final = -1
"""Stands for the limit of a job outside the model's support: a tensor of integers has no null."""
_LARGEST: Final = 2**63 - 1


class Row(NamedTuple):
    """One prediction: its id, what was answered, and the bundle that did."""

    prediction_id: str
    estimate: Prediction
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor: name, data type, how it is made for ``B`` predictions, and what it means."""

    name: str
    datatype: str
    values: Callable[[Sequence[Row]], Any]
    meaning: str

    @property
    def shape(self) -> list[int]:
        """As the model's metadata say it: -1 where the size varies."""
        return [-1, -1] if self.name == "probabilities" else [-1]


def _limit_bytes(estimate: Prediction) -> int:
    return NO_LIMIT if estimate.safe_bytes is None else min(estimate.safe_bytes, _LARGEST)


OUTPUTS: Final = (
    Output(
        "prediction_id", "BYTES", lambda rows: [row.prediction_id for row in rows], "under which what the job took is reported"
    ),
    Output(
        "request_bytes",
        "INT64",
        lambda rows: [min(row.estimate.expected_bytes, _LARGEST) for row in rows],
        "the packing floor: the job takes about as often more as less",
    ),
    Output(
        "limit_bytes",
        "INT64",
        lambda rows: [_limit_bytes(row.estimate) for row in rows],
        f"what the job stays below with the coverage; {NO_LIMIT} outside the model's support, where there is no limit",
    ),
    Output(
        "in_support",
        "BOOL",
        lambda rows: [row.estimate.in_support for row in rows],
        "whether the job resembles those that the model was trained on",
    ),
    Output(
        "reasons",
        "BYTES",
        lambda rows: ["\n".join(row.estimate.reasons) for row in rows],
        "why it does not, one sentence a line; empty inside the support",
    ),
    Output("bin_index", "INT32", lambda rows: [row.estimate.bin_index for row in rows], "the most probable bin, from 0"),
    Output(
        "probabilities",
        "FP64",
        lambda rows: [row.estimate.probabilities for row in rows],
        "probability of every bin; bin k reaches from k to k + 1 times the parameter bin_width_mib, and the last is open above",
    ),
    Output("gpu", "BYTES", lambda rows: [row.estimate.gpu for row in rows], "the GPU model that the amounts are for"),
    Output("model", "BYTES", lambda rows: [row.bundle.card.name for row in rows], "the bundle that answered"),
    Output("model_version", "BYTES", lambda rows: [row.bundle.card.version for row in rows], "its version"),
    Output("model_sha256", "BYTES", lambda rows: [row.bundle.sha256 for row in rows], "the hash over its files"),
)
"""All outputs of every model, in the order of the metadata."""

OUTPUT_NAMES: Final = tuple(output.name for output in OUTPUTS)
_NUMPY_TYPES: Final[Mapping[str, Any]] = {"INT64": np.int64, "INT32": np.int32, "BOOL": np.bool_, "FP64": np.float64}


def output_tensors(rows: Sequence[Row], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors called ``wanted`` by name, of ``B`` predictions."""
    return {output.name: _tensor(output, rows) for output in OUTPUTS if output.name in wanted}


def _tensor(output: Output, rows: Sequence[Row]) -> Tensor:
    values = output.values(rows)
    if output.datatype != "BYTES":
        values = np.array(values, dtype=_NUMPY_TYPES[output.datatype])
    return Tensor(output.name, output.datatype, values)
