"""Common parts of all pictures: size, colours for colour-blind readers (Okabe & Ito), axes of
memory, and files.

Figures are made without pyplot, so they share no state.  At 900 pixels' width their text is as
large as a page's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpumemnet.atomic_files import replace_file
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme
from gpumemnet.units import GIB, MIB
from research.report.section import Section

from .candidate_figures import GIB_BINS, CandidateFigures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH: Final = 9.0
"""Inches."""
RESOLUTION: Final = 150
OURS: Final = "#0072B2"
COLOURS: Final = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
FAMILY_COLOURS: Final[Mapping[str, str]] = {
    "mlp": "#0072B2",
    "cnn": "#E69F00",
    "transformer": "#009E73",
}
GREY: Final = "#808080"
MAX_CLASSES: Final = 24
_PHYSICS: Final = "calibrated physics"


def new_figure(height: float) -> Figure:
    """An empty figure of the common width; ``height`` in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=RESOLUTION)
    return content.getvalue()


def write_whole(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path`` atomically."""
    replace_file(path, content)
    return path


def shown_bins(*sections: Section) -> tuple[BinScheme, int]:
    """Bins of 1 GiB where the labels fall into at most 24, else of 8,000 MiB; and the number of
    bins up to the largest label."""
    top = max(
        (
            float(section.label_bytes[np.isfinite(section.label_bytes)].max(initial=0.0))
            for section in sections
        ),
        default=0.0,
    )
    scheme = GIB_BINS if top < MAX_CLASSES * GIB else PUBLISHED_BINS["published-8000mib"]
    return scheme, int(scheme.index(top)) + 1


def width_name(scheme: BinScheme) -> str:
    """A bin's width for a person."""
    return "1 GiB" if scheme is GIB_BINS else f"{scheme.width_bytes // MIB:,} MiB"


def label_word(section: Section) -> str:
    """The kind of the labels of ``section``: measured or traced."""
    return "measured" if section.is_measured else "traced"


def baselines(section: Section, figures: Mapping[str, CandidateFigures]) -> list[str]:
    """Two candidates to draw beside the section's own: calibrated physics, and the best of the
    others by median error.

    Variants of the section's own candidate are excluded.
    """
    others = [
        each
        for each in figures
        if not each.startswith(section.candidate) and not np.isnan(figures[each].median_error)
    ]
    others.sort(key=lambda each: (not each.startswith(_PHYSICS), figures[each].median_error))
    return others[:2]


def amount(value_bytes: float) -> str:
    """An amount on an axis."""
    return f"{value_bytes / GIB:.3g} GiB" if value_bytes >= GIB else f"{value_bytes / MIB:.3g} MiB"


def memory_axis(axis: Any) -> None:
    """Octaves, written out, on a logarithmic axis of bytes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=2, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))


def shortened(names: Sequence[str], most: int = 34) -> list[str]:
    """Names that fit into a legend."""
    return [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
