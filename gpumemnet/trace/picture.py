"""What the pictures of a trace show, whatever draws them: the memory over one steady step, thinned to what an eye can see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.trace.answer import TraceAnswer
from gpumemnet.trace.parts import PART_NAMES

_COLOURS: Final = (
    *(("context", "#999999"), ("parameter", "#0072B2"), ("buffer", "#56B4E9"), ("gradient", "#D55E00")),
    *(("optimizer_state", "#CC79A7"), ("saved_activation", "#009E73"), ("input", "#F0E442"), ("temporary", "#E69F00")),
    ("workspace", "#7B5BA6"),
)
BANDS: Final = tuple((part, PART_NAMES[part][0], colour) for part, colour in _COLOURS)
"""From the bottom up: memory class, its name, its colour (Okabe and Ito's, which colour-blind readers can tell apart)."""
POINTS: Final = 1_000
"""Most points along the time axis."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The memory over a step.

    Attributes:
        events: index of each point's event within the step.
        bands: for each of :data:`BANDS`, bytes at each point.
        total: what ``nvidia-smi`` would show at each point: reserved bytes and context.
        phases: ``(name, position of its first point)``.
        peak: position of the point that the answer's parts are of.
    """

    events: tuple[int, ...]
    bands: tuple[tuple[int, ...], ...]
    total: tuple[int, ...]
    phases: tuple[tuple[str, int], ...]
    peak: int


def picture(answer: TraceAnswer) -> Picture:
    """The picture of an answer, with at most :data:`POINTS` points; of the events that share one, the fullest is shown.

    Raises:
        InvalidRequestError: when the answer has no curve.
    """
    curve = answer.curve
    if curve is None:
        raise InvalidRequestError("this answer has no curve: ask for it with the question", "plot")
    rows = dict(zip(curve.classes, curve.bytes_by_class, strict=True))
    columns = list(zip(*curve.bytes_by_class, strict=True))
    sums = [sum(column) for column in columns]
    parts = [answer.parts.get(name, 0) for name in curve.classes]
    peak = min(range(len(columns)), key=lambda event: sum(abs(a - b) for a, b in zip(columns[event], parts, strict=True)))
    stride = -(-len(sums) // POINTS)
    kept = [max(range(start, min(start + stride, len(sums))), key=sums.__getitem__) for start in range(0, len(sums), stride)]
    kept[peak // stride] = peak
    context = answer.context_bytes
    return Picture(
        tuple(kept),
        tuple(
            tuple(context if name == "context" else rows[name][event] if name in rows else 0 for event in kept)
            for name, _, _ in BANDS
        ),
        tuple(curve.reserved_bytes[event] + context for event in kept),
        tuple((name, min(start // stride, len(kept) - 1)) for name, start in curve.phases),
        peak // stride,
    )
