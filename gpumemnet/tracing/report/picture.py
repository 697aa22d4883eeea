"""The content of a chart of a traced step, for every output format: bands, phases, the peak, and
lines for limits.

Each phase has a minimum width, because an optimizer with fused kernels allocates a few times and a
backward pass thousands of times.  A long step is reduced to visible points; each point is the
maximum of its interval, so no maximum is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from gpumemnet.errors import InvalidRequestError
from gpumemnet.tracing.report.answer import Curve, TraceAnswer
from gpumemnet.tracing.report.parts import PART_NAMES
from gpumemnet.units import GIB

COLOURS: Final = {
    "context": "#999999",
    "communicator": "#BBBBBB",
    "parameter": "#0072B2",
    "buffer": "#000000",
    "optimizer_state": "#009E73",
    "gradient": "#E69F00",
    "saved_activation": "#56B4E9",
    "input": "#F0E442",
    "temporary": "#D55E00",
    "communication": "#661100",
    "workspace": "#CC79A7",
}
"""Bands from the bottom up, the constant ones first, in the colours of Okabe and Ito for
colour-blind readers."""
MAX_MOMENTS: Final = 1_200
_LEAST_WIDTH: Final = 0.07
_START: Final = "start"
"""The part before the first phase: gradients are freed and the batch is loaded."""


@dataclass(frozen=True, slots=True)
class Band:
    """One band of the stacked chart.

    Attributes:
        part: memory class, or ``context``.
        name: its label.
        colour: as ``#rrggbb``.
        moments_bytes: its bytes at each point of the chart.
    """

    part: str
    name: str
    colour: str
    moments_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, from ``start`` to ``end`` on a horizontal axis from 0 to 1."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The chart of a step; its points are selected events of the curve.

    Attributes:
        bands: from the bottom up, the CUDA context first; classes without bytes in the step are
            left out.
        reserved_bytes: reserved bytes and context at each point, as ``nvidia-smi`` shows them.
        positions: start of each point's interval on the axis from 0 to 1, followed by 1.
        events: index of each point's event in the curve.
        phases: in order, adjacent to each other, from 0 to 1.
        phase_of: index of the phase of each point.
        peak: index of the marked point.
        is_run_peak: whether the marked point is the peak of the run, to which the answer's parts
            refer.
        available_bytes: memory that a process can use on the GPU; ``None`` if it is too far above
            the curve to draw.
        top_bytes: bytes of the highest line.
    """

    bands: tuple[Band, ...]
    reserved_bytes: tuple[int, ...]
    positions: tuple[float, ...]
    events: tuple[int, ...]
    phases: tuple[Span, ...]
    phase_of: tuple[int, ...]
    peak: int
    is_run_peak: bool
    available_bytes: int | None
    top_bytes: int

    @property
    def edges_bytes(self) -> list[list[int]]:
        """The upper edge of each band, from the bottom up."""
        edges: list[list[int]] = np.cumsum(
            [band.moments_bytes for band in self.bands], axis=0
        ).tolist()
        return edges

    @property
    def unused_bytes(self) -> list[int]:
        """Reserved bytes that no tensor holds, at each point."""
        return [
            reserved - used
            for reserved, used in zip(self.reserved_bytes, self.edges_bytes[-1], strict=True)
        ]

    @property
    def peak_position(self) -> float:
        """Position of the marked point, in the middle of its interval."""
        return (self.positions[self.peak] + self.positions[self.peak + 1]) / 2


def picture_of(answer: TraceAnswer) -> Picture:
    """Return the chart of an answer.

    Raises:
        InvalidRequestError: the answer has no curve.
    """
    curve = answer.curve
    if curve is None or not curve.reserved_bytes:
        raise InvalidRequestError(
            "the answer has no curve; trace with ExtraResults(curve=True)", "plot"
        )
    amounts = np.array(curve.bytes_by_class, dtype=np.int64).reshape(len(curve.classes), -1)
    totals = amounts.sum(axis=0)
    marked, is_run_peak = _marked(answer, curve, amounts, totals)
    names, bounds, edges = _phases(curve)
    events, positions, phase_of = _moments(bounds, edges, totals, marked)
    kept = amounts[:, events]
    other = {part: answer.parts[part] for part in ("context", "communicator") if answer.parts[part]}
    rows = {part: [size] * len(events) for part, size in other.items()}
    rows |= {
        name: kept[row].tolist() for row, name in enumerate(curve.classes) if amounts[row].any()
    }
    reserved = tuple(curve.reserved_bytes[event] + sum(other.values()) for event in events)
    highest = max(*reserved, answer.expected_bytes, answer.safe_bytes)
    available_bytes = answer.available_bytes if answer.available_bytes < 2 * highest else None
    return Picture(
        bands=tuple(
            Band(part, PART_NAMES[part][0], colour, tuple(rows[part]))
            for part, colour in COLOURS.items()
            if part in rows
        ),
        reserved_bytes=reserved,
        positions=tuple(positions),
        events=tuple(events),
        phases=tuple(
            Span(name, start, end)
            for name, (start, end) in zip(names, pairwise(edges), strict=True)
        ),
        phase_of=tuple(phase_of),
        peak=events.index(marked),
        is_run_peak=is_run_peak,
        available_bytes=available_bytes,
        top_bytes=max(highest, available_bytes or 0),
    )


def title_of(answer: TraceAnswer) -> str:
    """Return one line on what was traced."""
    gpu = answer.gpu if answer.ranks == 1 else f"one of {answer.ranks:,} x {answer.gpu}"
    return f"{answer.model}, batch size {answer.batch_size:,}, on {gpu}"


def peak_lines(answer: TraceAnswer, picture: Picture) -> tuple[str, str]:
    """Return two lines on the marked point: its phase and bytes, and the operator that
    allocated."""
    used = picture.edges_bytes[-1][picture.peak] / GIB
    phase = picture.phases[picture.phase_of[picture.peak]].name
    peak = answer.peak
    if picture.is_run_peak:
        module = f" in {peak.module}" if peak.module else ""
        return f"peak: {used:,.2f} GiB in use, {phase}", f"{peak.operator}{module}"
    step = f", step {peak.step}" if peak.step else ""
    return (
        f"most of this step: {used:,.2f} GiB in use, {phase}",
        f"the run's peak is elsewhere: {peak.phase}{step}",
    )


def _marked(
    answer: TraceAnswer, curve: Curve, amounts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]
) -> tuple[int, bool]:
    """Return the event to mark, and whether it is the peak of the run.

    The peak of the run may lie outside the step in steady state, for example in the first step.
    Then the maximum of the step is marked.
    """
    parts = np.array([answer.parts.get(name, 0) for name in curve.classes], dtype=np.int64)
    alike = np.flatnonzero((amounts == parts[:, np.newaxis]).all(axis=0))
    return (int(alike[0]), True) if alike.size else (int(totals.argmax()), False)


def _phases(curve: Curve) -> tuple[list[str], list[int], list[float]]:
    """Return names of the phases that have events, the events at their bounds, and the positions of
    their bounds."""
    n_events = len(curve.reserved_bytes)
    phases = [(_START, 0), *curve.phases]
    ends = [*(start for _, start in curve.phases), n_events]
    filled = [(name, start) for (name, start), end in zip(phases, ends, strict=True) if end > start]
    names, bounds = [name for name, _ in filled], [*(start for _, start in filled), n_events]
    widths = np.maximum(np.diff(bounds) / n_events, min(_LEAST_WIDTH, 0.5 / len(names)))
    edges = [0.0, *np.cumsum(widths / widths.sum()).tolist()]
    return names, bounds, [*edges[:-1], 1.0]


def _moments(
    bounds: Sequence[int], edges: Sequence[float], totals: npt.NDArray[np.int64], marked: int
) -> tuple[list[int], list[float], list[int]]:
    """Return the selected events, the start of each one's interval, and its phase."""
    events: list[int] = []
    positions: list[float] = []
    phase_of: list[int] = []
    for phase, ((first, end), (left, right)) in enumerate(
        zip(pairwise(bounds), pairwise(edges), strict=True)
    ):
        stretches = max(1, min(end - first, int(MAX_MOMENTS * (right - left))))
        cuts = [first + (end - first) * stretch // stretches for stretch in range(stretches + 1)]
        for start, stop in pairwise(cuts):
            events.append(
                marked if start <= marked < stop else start + int(totals[start:stop].argmax())
            )
            positions.append(left + (right - left) * (start - first) / (end - first))
            phase_of.append(phase)
    return events, [*positions, 1.0], phase_of
