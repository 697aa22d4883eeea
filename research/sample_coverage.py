"""Checks how evenly a dataset covers its features and its memory.

No tenth of a number's range, in logarithms, should hold more than a fifth of the rows.  No choice
should hold more than one and a half times its even share.  Up to three quarters of the GPU's
memory, no octave should be without labels.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataset_builder.planned_job import FEATURES as OPTIONS
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import GIB, MIB

TENTHS: Final = 10
TENTH_LIMIT: Final = 0.20
CHOICE_LIMIT: Final = 1.5
"""Largest share of a choice, as a multiple of the even share."""
MOST_CHOICES: Final = 12
"""A number with at most this many distinct values may be declared as a list of choices."""
LOWEST_LABEL_BYTES: Final = GIB // 2
CARD_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of the rows of one family over one feature.

    Attributes:
        feature: name of the feature.
        rows: number of rows that have the feature.
        low, high: ends of a number's range; ``None`` for choices.
        cells: share of the rows in each tenth of the range, or of each choice, most frequent first.
        names: name of each cell.
        limit: largest share that a cell may hold.
    """

    feature: str
    rows: int
    low: float | None
    high: float | None
    cells: tuple[float, ...]
    names: tuple[str, ...]
    limit: float

    @property
    def is_range(self) -> bool:
        """Whether the cells are tenths of a range."""
        return self.low is not None

    @property
    def ends(self) -> str:
        """Both ends of the range as text; empty for choices."""
        if self.low is None or self.high is None:
            return ""
        return " – ".join(
            f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in (self.low, self.high)
        )

    @property
    def crowding(self) -> float:
        """Share of the fullest cell over the limit: at most one in an even sample."""
        return max(self.cells) / self.limit

    @property
    def within(self) -> bool:
        """Whether no cell exceeds the limit."""
        return self.crowding <= 1.0

    @property
    def fullest(self) -> str:
        """The name of the fullest cell."""
        return self.names[int(np.argmax(self.cells))]


def feature_values(measurement: Measurement) -> dict[str, Any]:
    """The declared features of one row: its options, and every number and string of its
    architecture.

    A list counts as its length and its largest number; a feature that is ``None`` does not apply to
    the row.
    """
    job = measurement.job
    values = {name: getattr(job, name) for name in OPTIONS if hasattr(job, name)}
    values["attention_kernel"] = job.attention_kernel
    values |= {
        name: value for name, value in _object(measurement.options).items() if name in OPTIONS
    }
    flat: dict[str, Any] = {}
    _flatten("", _object(measurement.architecture), flat)
    values |= flat
    return {name: value for name, value in values.items() if value is not None}


def _object(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, Mapping) else {}


def _flatten(prefix: str, document: Mapping[str, Any], into: dict[str, Any]) -> None:
    for name, value in document.items():
        if isinstance(value, Mapping):
            _flatten(f"{prefix}{name}.", value, into)
        elif isinstance(value, list):
            numbers = list(_leaves(value))
            into[f"{prefix}{name} (count)"] = len(numbers)
            if numbers and not any(isinstance(number, str | bool | None) for number in numbers):
                into[f"{prefix}{name} (largest)"] = max(numbers)
        else:
            into[f"{prefix}{name}"] = value


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, list):
        for element in value:
            yield from _leaves(element)
    else:
        yield value


def spreads(measurements: Iterable[Measurement]) -> list[Spread]:
    """The spread of every feature that takes more than one value, ranges first, each kind in
    alphabetical order."""
    columns: dict[str, list[Any]] = {}
    for measurement in measurements:
        for name, value in feature_values(measurement).items():
            columns.setdefault(name, []).append(value)
    found = [
        spread(name, values) for name, values in sorted(columns.items()) if len(set(values)) > 1
    ]
    return sorted(found, key=lambda spread: not spread.is_range)


def spread(feature: str, values: Sequence[Any]) -> Spread:
    """The spread of one feature; a number with few values counts as a range or as choices,
    whichever fits better."""
    numeric = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    choices = _choices(feature, values)
    if not numeric:
        return choices
    numbers = _range(feature, values)
    if len(set(values)) > MOST_CHOICES:
        return numbers
    return min(numbers, choices, key=lambda spread: spread.crowding)


def _choices(feature: str, values: Sequence[Any]) -> Spread:
    common = Counter(map(_value_text, values)).most_common()
    shares = tuple(count / len(values) for _, count in common)
    return Spread(
        feature,
        len(values),
        None,
        None,
        shares,
        tuple(name for name, _ in common),
        CHOICE_LIMIT / len(common),
    )


def _value_text(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _range(feature: str, values: Sequence[float]) -> Spread:
    """Shares of the rows in tenths of the range, logarithmic unless the range contains zero or
    negative values.

    A whole number k represents the interval from k to k + 1, and its rows are distributed evenly
    over it.  Otherwise the few whole numbers in the lower tenths of a logarithmic range would look
    like an uneven sample.
    """
    column = np.asarray(values, dtype=np.float64)
    low, high = float(column.min()), float(column.max())
    scale = np.log if low > 0 else np.asarray
    if all(isinstance(value, int) for value in values):
        numbers, counts = np.unique(column, return_counts=True)
        knots = scale(np.stack([numbers, numbers + 1], axis=1).ravel())
        below = np.concatenate([[0.0], np.repeat(np.cumsum(counts), 2)[:-1]])
        edges = np.linspace(knots[0], knots[-1], TENTHS + 1)
        counts_by_tenth = np.diff(np.interp(edges, knots, below))
    else:
        counts_by_tenth = np.histogram(scale(column), bins=TENTHS)[0].astype(np.float64)
    names = tuple(f"tenth {tenth}" for tenth in range(1, TENTHS + 1))
    return Spread(
        feature,
        len(values),
        low,
        high,
        tuple((counts_by_tenth / len(values)).tolist()),
        names,
        TENTH_LIMIT,
    )


@dataclass(frozen=True, slots=True)
class Octave:
    """Number of rows with a label between ``low_bytes`` and twice that; the lowest octave begins at
    zero."""

    low_bytes: int
    high_bytes: int
    rows: int

    @property
    def name(self) -> str:
        """For a person."""
        if self.low_bytes == 0:
            return f"below {octave_name(self.high_bytes)}"
        return f"{octave_name(self.low_bytes)} – {octave_name(self.high_bytes)}"


def octave_name(edge_bytes: int) -> str:
    """Formats an octave's edge."""
    return f"{edge_bytes // MIB} MiB" if edge_bytes < GIB else f"{edge_bytes // GIB} GiB"


def label_octaves(label_bytes: NDArray[np.int64], capacity_bytes: int) -> list[Octave]:
    """Counts labels per octave, from 0.5 GiB up to the octave that contains ``capacity_bytes``."""
    top = max(
        1, math.ceil(math.log2(max(capacity_bytes, *label_bytes.tolist(), 1) / LOWEST_LABEL_BYTES))
    )
    edges = [0, *(LOWEST_LABEL_BYTES << exponent for exponent in range(top + 1))]
    counts, _ = np.histogram(label_bytes, bins=edges)
    return [
        Octave(low, high, int(count))
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


def empty_octaves(octaves: Iterable[Octave], capacity_bytes: int) -> list[Octave]:
    """Octaves without labels between 0.5 GiB and three quarters of the GPU's memory."""
    return [
        octave
        for octave in octaves
        if 0 < octave.low_bytes < CARD_SHARE * capacity_bytes and not octave.rows
    ]
