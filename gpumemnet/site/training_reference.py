"""A summary of the jobs that a model was trained on, with which drift detection compares recent
jobs: some 10 KB in a card.

Amounts are kept as evenly spaced quantiles, options and layer kinds as counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.gpu.catalogue import GENERIC_BLAS_WORKSPACE_BYTES
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import OPTION_FIELDS
from gpumemnet.predict.features import FEATURE_NAMES, feature_matrix

AMOUNTS: Final = (
    *(
        "batch_size",
        "input_elements",
        "total_parameters",
        "total_activations",
        "trainable_share",
        "sequence_length",
    ),
    *("input_bytes", "activation_bytes"),
)
"""Feature columns that totals give and that do not depend on the GPU."""
OPTIONS: Final = (
    *("optimizer", "optimizer_implementation", "precision", "checkpointing", "attention_kernel"),
    *("channels_last", "cudnn_benchmark", "gradient_accumulation"),
)
QUANTILES: Final = 65


@dataclass(frozen=True, slots=True)
class TrainingReference:
    """Summary of the jobs of one family.

    Attributes:
        rows, rows_with_layers: number of jobs, and of those with a layer list.
        quantiles: feature column → evenly spaced quantiles, from the smallest to the largest value.
        options: job field → value, as text → jobs with it.
        kinds: layer kind → jobs with a layer of it.
    """

    rows: int
    rows_with_layers: int
    quantiles: Mapping[str, tuple[float, ...]]
    options: Mapping[str, Mapping[str, int]]
    kinds: Mapping[str, int]


def training_reference(table: JobTable) -> TrainingReference:
    """The summary of the jobs of ``table``, at least one."""
    steps = np.linspace(0.0, 1.0, QUANTILES)
    quantiles = {
        name: np.quantile(values, steps, method="inverted_cdf")
        for name, values in job_amounts(table).items()
    }
    return TrainingReference(
        rows=len(table),
        rows_with_layers=int((table.layer_counts > 0).sum()),
        quantiles={name: tuple(values.tolist()) for name, values in quantiles.items()},
        options={field: option_counts(table, field) for field in OPTIONS},
        kinds=kind_counts(table),
    )


def job_amounts(table: JobTable) -> dict[str, NDArray[np.float64]]:
    """The columns :data:`AMOUNTS` of ``B`` jobs, shape ``[B]`` each."""
    features = feature_matrix(table, GENERIC_BLAS_WORKSPACE_BYTES)
    return {name: features[:, FEATURE_NAMES.index(name)] for name in AMOUNTS}


def option_counts(table: JobTable, field: str) -> dict[str, int]:
    """Value of the field, as text → number of jobs with it."""
    is_option = field in OPTION_FIELDS
    values = table.option_column(field) if is_option else table.column(field).astype(np.int64)
    return dict(sorted(Counter(map(str, values)).items()))


def kind_counts(table: JobTable) -> dict[str, int]:
    """Layer kind → number of jobs with a layer of it."""
    pairs = np.unique(np.stack((table.layer_owners, table.layer_kinds)), axis=1)
    return dict(sorted(Counter(table.kind_names[kind] for kind in pairs[1].tolist()).items()))


def reference_document(reference: TrainingReference) -> dict[str, Any]:
    """The reference as the JSON object under ``reference`` in a card."""
    return {
        "rows": reference.rows,
        "rows_with_layers": reference.rows_with_layers,
        "quantiles": {name: list(values) for name, values in reference.quantiles.items()},
        "options": {field: dict(counts) for field, counts in reference.options.items()},
        "kinds": dict(reference.kinds),
    }


def reference_from_card(document: Any) -> TrainingReference | None:
    """The reference in a card; ``None`` if it has none, or one that this version cannot use.  Only
    drift detection needs it."""
    try:
        reference = TrainingReference(
            rows=_count(document["rows"]),
            rows_with_layers=_count(document["rows_with_layers"]),
            quantiles={str(name): _rising(document["quantiles"][name]) for name in AMOUNTS},
            options={
                str(field): {
                    str(value): _count(number)
                    for value, number in document["options"][field].items()
                }
                for field in OPTIONS
            },
            kinds={str(kind): _count(number) for kind, number in document["kinds"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return reference if reference.rows else None


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no count")
    return int(value)


def _rising(values: Any) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or list(numbers) != sorted(numbers):
        raise ValueError("no quantiles")
    return numbers
