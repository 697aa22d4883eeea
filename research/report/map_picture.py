"""Maps of all jobs of a report: principal components and t-SNE (van der Maaten & Hinton, JMLR 9,
2008) of their features.

As in GPUMemNet's figure of its dataset, colour is the bin: where colours mix, the features do not
separate the bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from research.report.section import Section

from .candidate_figures import judged_rows
from .canvas import new_figure, shown_bins, width_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

MAX_MAP_ROWS: Final = 1_500
MIN_ROWS: Final = 8
PERPLEXITY: Final = 30.0
SEED: Final = 0
_MARKERS: Final = {"mlp": "o", "cnn": "s", "transformer": "^"}


def map_picture(sections: Sequence[Section], max_rows: int = MAX_MAP_ROWS) -> Figure | None:
    """Both maps of at most ``max_rows`` different jobs, coloured by bin, marked by family; ``None``
    for fewer than eight."""
    rows = [(section, row) for section in sections for row in judged_rows(section).tolist()]
    rows = list(
        {
            (section.features[row].tobytes(), section.label_bytes[row]): (section, row)
            for section, row in rows
        }.values()
    )
    if len(rows) < MIN_ROWS:
        return None
    if len(rows) > max_rows:
        chosen = np.sort(np.random.default_rng(SEED).choice(len(rows), max_rows, replace=False))
        rows = [rows[index] for index in chosen.tolist()]
    points = standardised(np.stack([section.features[row] for section, row in rows]))
    families = np.array([section.jobs[row].family for section, row in rows])
    scheme, classes = shown_bins(*sections)
    bins = np.minimum(
        scheme.index(np.array([section.label_bytes[row] for section, row in rows])), classes - 1
    )
    components, variance = principal_components(points)
    figure = new_figure(5.0)
    titles = (f"principal components ({variance:.0%} of the variance)", "t-SNE")
    panels = figure.subplots(1, 2)
    for axes, points_2d, title in zip(panels, (components, tsne(points)), titles, strict=True):
        for family, marker in _MARKERS.items():
            in_family = families == family
            if in_family.any():
                image = axes.scatter(
                    *points_2d[in_family].T,
                    c=bins[in_family],
                    cmap="viridis",
                    vmin=-0.5,
                    vmax=classes - 0.5,
                    s=11,
                    marker=marker,
                    linewidth=0,
                )
        axes.set(title=title, xticks=[], yticks=[])
    bar = figure.colorbar(image, ax=panels, shrink=0.9, label=f"bin of {width_name(scheme)}")
    bar.set_ticks(list(range(0, classes, 1 if classes <= 12 else 4)))
    if len(set(families.tolist())) > 1:
        figure.legend(
            handles=_family_keys(set(families.tolist())),
            loc="outside lower center",
            ncols=3,
            frameon=False,
        )
    return figure


def standardised(features: Array) -> Array:
    """Logarithms of the features, each column with mean zero and variance one; constant columns
    left out, shape ``[B, F']``.

    At least two columns, so that they can be drawn.
    """
    columns = np.log1p(np.maximum(features, 0.0))
    deviation = columns.std(axis=0)
    varied = deviation > 1e-9
    scaled = (columns[:, varied] - columns[:, varied].mean(axis=0)) / deviation[varied]
    return np.pad(scaled, ((0, 0), (0, max(0, 2 - scaled.shape[1]))))


def principal_components(points: Array) -> tuple[Array, float]:
    """The first two principal components, shape ``[B, 2]``, and their share of the variance."""
    from sklearn.decomposition import PCA

    if not points.any():
        return points[:, :2], 0.0
    analysis = PCA(2, random_state=SEED)
    return analysis.fit_transform(points), float(analysis.explained_variance_ratio_.sum())


def tsne(points: Array) -> Array:
    """t-SNE from the principal components on, the same every time, shape ``[B, 2]``."""
    from sklearn.manifold import TSNE

    if not points.any():
        return points[:, :2]
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    embedded: Array = TSNE(2, perplexity=perplexity, init="pca", random_state=SEED).fit_transform(
        points
    )
    return embedded


def _family_keys(families: set[str]) -> list[object]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], marker=_MARKERS[each], linestyle="", color="black", label=each)
        for each in _MARKERS
        if each in families
    ]
