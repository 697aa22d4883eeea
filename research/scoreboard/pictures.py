"""The pictures of the scoreboard: strips of points, one for each estimator or kind of run."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH: Final = 9.0
"""Inches."""
RESOLUTION: Final = 150
_OURS, _RED, _BLACK = "#0072B2", "#D55E00", "#000000"
_BAND: Final = 0.1
_EDGES: Final = {False: (0.05, 20.0), True: (0.6, 1.2)}
"""Whether shares are those of a bound → where points beyond are drawn."""
_SHARES: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=RESOLUTION)
    return content.getvalue()


def strips(groups: Mapping[str, NDArray[np.float64]], words: str, *, is_bound: bool) -> Figure:
    """Shares around 1, one strip for each group.

    Args:
        groups: name → shares; ours are blue.
        words: what they are.
        is_bound: whether what lies above 1 is a failure, which is red, and the scale is linear.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.45 * len(groups) + 1.0), layout="constrained")
    axes = figure.subplots()
    random = np.random.default_rng(0)
    names = list(groups)[::-1]
    for height, name in enumerate(names):
        values = groups[name]
        own = _OURS if is_bound or name.startswith("gpumemnet") else _BLACK
        colours = np.where((values > 1.0) & is_bound, _RED, own)
        heights = height + random.uniform(-0.3, 0.3, len(values))
        shown = np.clip(values, *_EDGES[is_bound])
        axes.scatter(shown, heights, s=7, c=colours, alpha=0.5, linewidths=0)
    axes.axvline(1.0, color=_BLACK, linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel(words, fontsize=8)
    if not is_bound:
        axes.set_xscale("log")
        axes.axvspan(1.0 - _BAND, 1.0 + _BAND, color=_OURS, alpha=0.12)
        axes.set_xticks(_SHARES, [f"{share:g}" for share in _SHARES])
    return figure
