"""Groups of a section's jobs that are judged separately: by family, optimizer, precision,
checkpointing and octave of memory.

A good mean can hide a bad group.  Groups of fewer than 20 jobs are left out, and so is a single
group, which equals the section.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.training_job import CHECKPOINTING, FAMILIES, OPTIMIZERS, PRECISIONS
from gpumemnet.units import GIB
from research.report.section import Section

from .candidate_figures import judged_rows

Rows = NDArray[np.int64]

MIN_ROWS: Final = 20
OCTAVE_WORD: Final = "octave of memory"
_OPTIONS: Final = {
    "family": FAMILIES,
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "checkpointing": CHECKPOINTING,
}


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Jobs that share one property; ``rows`` of the section, shape ``[R]``."""

    name: str
    rows: Rows


def groupings(section: Section) -> dict[str, list[Group]]:
    """Property → its groups of at least 20 judged jobs, if there are several."""
    judged = judged_rows(section)
    groups_by_property = {OCTAVE_WORD: octave_groups(section.label_bytes, judged)}
    for option, choices in _OPTIONS.items():
        values = [getattr(section.jobs[row], option) for row in judged.tolist()]
        groups_by_property[option] = _split(judged, values, choices)
    large_groups = {
        name: [group for group in groups_by_property[name] if len(group.rows) >= MIN_ROWS]
        for name in (*_OPTIONS, OCTAVE_WORD)
    }
    return {name: groups for name, groups in large_groups.items() if len(groups) > 1}


def octave_groups(label_bytes: NDArray[np.float64], rows: Rows) -> list[Group]:
    """``rows`` by octaves of their labels, from the lowest up: below 0.5 GiB, 0.5–1, 1–2 and so
    on."""
    octaves = np.maximum(np.floor(np.log2(label_bytes[rows] / GIB)), -2).astype(np.int64)
    groups = _split(rows, octaves.tolist(), range(-2, int(octaves.max(initial=-2)) + 1))
    return [Group(octave_name(int(group.name)), group.rows) for group in groups]


def octave_name(octave: int) -> str:
    """The octave from ``2**octave`` GiB up, for a person; everything below 0.5 GiB is one."""
    return "below 0.5 GiB" if octave < -1 else f"{2.0**octave:g}–{2.0 ** (octave + 1):g} GiB"


def _split(rows: Rows, values: Sequence[Hashable], choices: Sequence[Hashable]) -> list[Group]:
    column = np.array([choices.index(value) for value in values], dtype=np.int64)
    return [Group(str(choices[code]), rows[column == code]) for code in np.unique(column).tolist()]
