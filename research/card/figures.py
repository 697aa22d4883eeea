"""Draws the figures of a data card: labels, coverage, growth, contexts and maps, in colours for
colour-blind readers.

Figures are made without pyplot, so they share no state.  The colours are those of Okabe & Ito and
of cividis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.predict.features import feature_matrix
from gpumemnet.site.validation import training_state_bytes
from gpumemnet.units import GIB, MIB

from .coverage import CHOICE_LIMIT, TENTH_LIMIT, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Families = Mapping[str, Sequence[Measurement]]

COLOURS: Final[Mapping[str, str]] = {"mlp": "#0072B2", "cnn": "#E69F00", "transformer": "#009E73"}
OOM_COLOUR: Final = "#D55E00"
MAP_ROWS: Final = 1_000
_FEW_OCTAVES: Final = 4
_ZOOM_BYTES: Final = 128 * MIB
_ZOOM_ROWS: Final = 50
_MAX_POINTS: Final = 5_000
_MOST_BARS: Final = 12
_WORKSPACE_BYTES: Final = 8 * MIB
_PERPLEXITY: Final = 30.0
_FEWEST_EMBEDDED: Final = 3


def label_figure(families: Families) -> Figure:
    """Labels of every family by quarter octaves; jobs that ran out of memory are at the memory that
    they had."""
    figure, panels = _stack(families, 2.3)
    amounts = [
        amount
        for rows in families.values()
        for row in rows
        if (amount := row.label_bytes or _bound(row))
    ]
    bins = np.arange(
        np.floor(np.log2(min(amounts))), np.ceil(np.log2(max(amounts)) + 0.01) + 0.125, 0.25
    )
    for axes, (family, rows) in zip(panels, families.items(), strict=True):
        labels = [np.log2(row.label_bytes) for row in rows if row.label_bytes]
        bounds = [np.log2(_bound(row)) for row in rows if _bound(row)]
        kinds = [
            (labels, COLOURS[family], "", "label"),
            (bounds, OOM_COLOUR, "////", "out of memory: more than this"),
        ]
        below = np.zeros(len(bins) - 1)
        for values, colour, hatch, name in kinds:
            counts, _ = np.histogram(values, bins)
            style = (
                {"facecolor": "white", "edgecolor": colour, "hatch": hatch}
                if hatch
                else {"facecolor": colour, "edgecolor": "white"}
            )
            if values:
                axes.bar(
                    bins[:-1],
                    counts,
                    0.25,
                    below,
                    align="edge",
                    label=f"{name} ({len(values):,})",
                    linewidth=0.5,
                    **style,
                )
            below += counts
        axes.set(title=family, ylabel="rows", ylim=(0, 1.05 * max(1.0, below.max())))
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    panels[-1].set_xlabel("GPU memory")
    _memory_axis(panels[-1], bins[0], bins[-1])
    return figure


def coverage_figure(family: str, spreads: Sequence[Spread]) -> Figure:
    """Left: share of the rows in each tenth of each number's range.  Right: the most frequent
    choice against its even share."""
    ranges = [spread for spread in spreads if spread.is_range]
    choices = [spread for spread in spreads if not spread.is_range]
    columns = (
        [choices]
        if len(choices) <= _MOST_BARS
        else [choices[: -(-len(choices) // 2)], choices[-(-len(choices) // 2) :]]
    )
    figure = _figure(
        13.0 + 3.0 * (len(columns) - 1), max(2.4, 1.3 + 0.36 * max(len(ranges), *map(len, columns)))
    )
    left, *others = figure.subplots(
        1,
        1 + len(columns),
        width_ratios=(1.25, *[1.0 if len(columns) == 1 else 0.55] * len(columns)),
    )
    if ranges:
        _draw_tenths(left, ranges)
    left.set(
        title=f"{family}: % of the rows in each tenth of the range (white: above {100 * TENTH_LIMIT:g})",
        xlabel="tenth",
    )
    longest = 1.1 * max([CHOICE_LIMIT, *(CHOICE_LIMIT * spread.crowding for spread in choices)])
    for axes, column_choices in zip(others, columns, strict=True):
        _draw_choices(axes, column_choices, COLOURS[family], longest)
    return figure


def _draw_tenths(axes: Axes, ranges: Sequence[Spread]) -> None:
    shares = 100 * np.array([spread.cells for spread in ranges])
    axes.imshow(shares, cmap="cividis_r", vmin=0, vmax=2 * 100 * TENTH_LIMIT, aspect=0.6)
    axes.set_anchor("N")
    for (row, tenth), share in np.ndenumerate(shares):
        over = share > 100 * TENTH_LIMIT
        colour, weight = ("white", "bold") if over else ("black", "normal")
        axes.text(
            tenth,
            row,
            f"{share:.0f}",
            ha="center",
            va="center",
            fontsize=9,
            color=colour,
            weight=weight,
        )
    axes.set_xticks(range(10), [str(tenth) for tenth in range(1, 11)])
    axes.set_yticks(
        range(len(ranges)), [f"{spread.feature}\n{spread.ends}" for spread in ranges], fontsize=8
    )


def _draw_choices(axes: Axes, choices: Sequence[Spread], colour: str, longest: float) -> None:
    colours = [colour if spread.within else OOM_COLOUR for spread in choices]
    hatches = ["" if spread.within else "////" for spread in choices]
    axes.barh(
        range(len(choices)),
        [CHOICE_LIMIT * spread.crowding for spread in choices],
        color=colours,
        hatch=hatches,
    )
    axes.axvline(CHOICE_LIMIT, color="black", linestyle="--", linewidth=1)
    names = [
        f"{spread.feature}\n{spread.fullest}: {max(spread.cells):.0%}, {len(spread.cells)} values"
        for spread in choices
    ]
    axes.set_yticks(range(len(choices)), names, fontsize=8)
    axes.set(ylim=(len(choices) - 0.4, -0.6), xlim=(0, longest))
    axes.set(
        title=f"most frequent choice (limit {CHOICE_LIMIT:g}, dashed)",
        xlabel="times its even share",
    )


def growth_figure(families: Families) -> Figure:
    """Left: labels against the weights' bytes.  Right: the smallest jobs, whose labels rise in
    steps of allocator segments."""
    figure = _figure(13.0, 3.6 * len(families))
    grid = figure.subplots(len(families), 2, squeeze=False)
    for (left, right), (family, family_rows) in zip(grid, families.items(), strict=True):
        rows = [row for row in _thinned(family_rows) if row.label_bytes]
        weights = [training_state_bytes(row)[0] for row in rows]
        left.scatter(
            weights,
            [row.label_bytes for row in rows],
            s=6,
            alpha=0.5,
            color=COLOURS[family],
            linewidth=0,
            rasterized=True,
        )
        left.set_xscale("log", base=2)
        left.set_yscale("log", base=2)
        left.set(
            title=f"{family}: label against weights", xlabel="bytes of the weights", ylabel="label"
        )
        _log_memory(left.xaxis, left.get_xlim())
        _log_memory(left.yaxis, left.get_ylim())
        reserved = all(row.peak_reserved_bytes is not None for row in rows)
        sizes = np.array([_tensor_bytes(row) for row in rows]) / MIB
        limit = max(
            _ZOOM_BYTES / MIB,
            float(
                np.partition(sizes, min(_ZOOM_ROWS, len(sizes)) - 1)[
                    min(_ZOOM_ROWS, len(sizes)) - 1
                ]
            ),
        )
        near = [(size, row) for size, row in zip(sizes, rows, strict=True) if size <= limit]
        amounts = [
            ((row.peak_reserved_bytes if reserved else row.label_bytes) or 0) / MIB
            for _, row in near
        ]
        right.scatter(
            [size for size, _ in near],
            amounts,
            s=6,
            alpha=0.6,
            color=COLOURS[family],
            linewidth=0,
            rasterized=True,
        )
        if amounts:
            low, high = min(amounts), float(np.quantile(amounts, 0.95))
            right.set_ylim(low - 0.05 * (high - low) - 1, high + 0.1 * (high - low) + 1)
        kind = "peak_reserved_bytes" if reserved else "label"
        right.set(title=f"{family}: the smallest jobs", ylabel=f"{kind}, MiB")
        right.set_xlabel("weights, gradients, optimizer state and activations, MiB")
        right.grid(axis="y", linewidth=0.4)
    return figure


def context_figure(families: Families) -> Figure | None:
    """Context bytes of every family, or ``None`` when no row states them."""
    known = {
        family: [row.context_bytes / MIB for row in rows if row.context_bytes]
        for family, rows in families.items()
    }
    known = {family: values for family, values in known.items() if values}
    if not known:
        return None
    figure, panels = _stack(known, 1.9)
    edges = np.histogram_bin_edges(
        np.concatenate([np.asarray(amounts) for amounts in known.values()]), bins=60
    )
    for axes, (family, values) in zip(panels, known.items(), strict=True):
        axes.hist(values, bins=edges, color=COLOURS[family])
        axes.axvline(float(np.median(values)), color="black", linestyle="--", linewidth=1)
        axes.set(title=f"{family}: median {np.median(values):,.0f} MiB (dashed)", ylabel="rows")
    panels[-1].set_xlabel("context_bytes: process less reserved after the last step, MiB")
    return figure


def map_figure(family: str, rows: Sequence[Measurement], seed: int = 0) -> Figure:
    """Principal components and t-SNE of the feature vectors of at most 1,000 rows, coloured by bin;
    out of memory are crosses."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    chosen = [row for row in rows if row.status in ("ok", "oom")]
    if len(chosen) > MAP_ROWS:
        picked = np.random.default_rng(seed).choice(len(chosen), MAP_ROWS, replace=False)
        chosen = [chosen[index] for index in sorted(picked)]
    labels = np.array([row.label_bytes or 0 for row in chosen], dtype=np.float64)
    fits = labels > 0
    edges = map_edges(labels[fits]) if fits.any() else np.array([GIB, 2.0 * GIB])
    bins = np.digitize(labels[fits], edges) - 1
    points = scaled_features([row.job for row in chosen])
    principal = PCA(n_components=min(2, *points.shape))
    components = _in_plane(principal.fit_transform(points))
    neighbours = min(_PERPLEXITY, (len(chosen) - 1) / 3)
    embedded = (
        TSNE(perplexity=neighbours, init="pca", random_state=seed).fit_transform(points)
        if len(chosen) > _FEWEST_EMBEDDED and points.shape[1] > 1
        else components
    )
    figure = _figure(13.0, 5.4)
    titles = (
        f"{family}: principal components ({principal.explained_variance_ratio_.sum():.0%} of the variance)",
        f"{family}: t-SNE",
    )
    top = len(edges) - 2
    for axes, places, title in zip(
        figure.subplots(1, 2), (components, embedded), titles, strict=True
    ):
        axes.scatter(
            *places[fits].T, c=bins, cmap="cividis", vmin=0, vmax=max(1, top), s=10, linewidth=0
        )
        axes.scatter(*places[~fits].T, marker="x", color=OOM_COLOUR, s=14, linewidth=0.9)
        axes.set(title=title, xticks=[], yticks=[])
    colour = colormaps["cividis"]
    keys = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            color=colour(bin_index / max(1, top)),
            label=f"{_amount(edges[bin_index])} – {_amount(edges[bin_index + 1])}",
        )
        for bin_index in sorted(set(bins.tolist()))
    ]
    if not fits.all():
        keys.append(
            Line2D([], [], marker="x", linestyle="", color=OOM_COLOUR, label="out of memory")
        )
    figure.legend(handles=keys, loc="outside right upper", frameon=False, title="label")
    return figure


def scaled_features(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """Feature vectors in logarithms, each column with mean zero and variance one, shape ``[B, F]``;
    constant columns are left out."""
    columns = np.log1p(np.maximum(feature_matrix(JobTable.from_jobs(jobs), _WORKSPACE_BYTES), 0.0))
    deviation = columns.std(axis=0)
    varied = deviation > 1e-9
    if not varied.any():
        return np.zeros((len(jobs), 1))
    scaled: NDArray[np.float64] = (columns - columns.mean(axis=0))[:, varied] / deviation[varied]
    return scaled


def _in_plane(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """``points`` with a second coordinate of zero where they have only one."""
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def map_edges(label_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Edges of bins that double in width, or grow by the square root of two where that gives fewer
    than four."""
    low, high = np.floor(np.log2(label_bytes.min())), np.log2(label_bytes.max())
    step = 1.0 if high - low > _FEW_OCTAVES else 0.5
    edges: NDArray[np.float64] = 2.0 ** np.arange(low, high + step, step)
    return edges


def _bound(row: Measurement) -> int:
    """Lower bound of the memory of a job that ran out of memory; 0 for all others."""
    return row.capacity_bytes if row.status == "oom" else 0


def _tensor_bytes(row: Measurement) -> int:
    job = row.job
    assert job.total_activations is not None
    return (
        training_state_bytes(row)[1]
        + job.total_activations * job.batch_size * ELEMENT_BYTES[job.precision].activation
    )


def _thinned(rows: Sequence[Measurement]) -> Sequence[Measurement]:
    return rows[:: -(-len(rows) // _MAX_POINTS)] if rows else rows


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _stack(families: Mapping[str, object], height: float) -> tuple[Figure, NDArray[Any]]:
    """One panel per family, one below the other, on a shared horizontal axis."""
    figure = _figure(13.0, 0.7 + height * len(families))
    return figure, figure.subplots(len(families), 1, sharex=True, squeeze=False)[:, 0]


def _memory_axis(axes: Axes, low: float, high: float) -> None:
    """Labels an axis in binary logarithms with the amounts at octaves."""
    octaves = range(int(np.ceil(low)), int(np.floor(high)) + 1)
    axes.set_xticks(list(octaves), [_amount(2.0**octave) for octave in octaves])


def _log_memory(axis: Any, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    few = limits[1] < 16 * limits[0]
    axis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.25, 1.5) if few else (1.0,), numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _amount(value)))


def _amount(value_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if value_bytes >= unit:
            return f"{value_bytes / unit:.3g} {name}"
    return f"{value_bytes:g} B"
