"""The data card of a dataset: contents, measurement, labels and coverage, from the file alone.

After Gebru et al., "Datasheets for Datasets" (arXiv 1803.09010).  Every number is computed from the
rows.  The colours are those of Okabe & Ito and of cividis, for colour-blind readers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import STATUSES, Measurement
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.predict.features import feature_matrix
from gpumemnet.site.implausible_rows import implausible_rows
from gpumemnet.units import MIB, format_bytes
from models.training.data import ZOO
from research.sample_coverage import (
    CHOICE_LIMIT,
    TENTH_LIMIT,
    Spread,
    empty_octaves,
    label_octaves,
    spreads,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Families = Mapping[str, Sequence[Measurement]]

CARD_NAME = "README.md"
"""File name that code hosts display for a folder."""
_DPI: Final = 110
_COLOURS: Final = {"mlp": "#0072B2", "cnn": "#E69F00", "transformer": "#009E73"}
_OOM_COLOUR: Final = "#D55E00"
_MAP_ROWS: Final = 1_000
_WORKSPACE_BYTES: Final = 8 * MIB
_PERPLEXITY: Final = 30.0
_FEWEST_EMBEDDED: Final = 3
_SOURCES: Final[Mapping[str, str]] = {
    "nvml_accounting": "the driver's accounting statistics: the process's exact maximum",
    "nvml_process": "the driver's used memory of the process, read after every step and every 20 ms between",
    "nvml_device_difference": "used memory of the whole device less its idle reading, one job at a time",
    "traced": "a trace through the simulated allocator; nothing was executed",
    "nvidia_smi_device_1s": "the largest of one-second `nvidia-smi` readings of the whole device",
}


def write_card(dataset: Path, out: Path) -> list[Path]:
    """Writes the card of ``dataset`` and its pictures into the folder ``out``; returns their paths,
    the card first.

    Raises:
        DatasetError: when the dataset cannot be read or is empty, or the folder cannot be written.
    """
    rows = read_dataset(dataset)
    if not rows:
        raise DatasetError(f"{dataset} has no rows to describe")
    families = _by_family(rows)
    judged = {
        family: judged_rows
        for family, family_rows in families.items()
        if (judged_rows := [row for row in family_rows if row.label_bytes or row.status == "oom"])
    }
    pictures = {f"map_{family}": map_picture(family, each) for family, each in judged.items()}
    if judged:
        pictures["labels"] = label_picture(judged)
    digest = hashlib.sha256(dataset.read_bytes()).hexdigest()
    parts = [
        f"# Data card of {dataset.name}",
        f"Written by `python -m research card {dataset.name}` from the file with SHA-256 `{digest}`.",
        "## Contents",
        _counts(rows, families),
        "## How it was measured",
        _sources(rows),
        _stacks(rows),
        "## Labels",
        _labels(families),
        *(["![Labels](labels.png)"] if judged else []),
        "## Context bytes",
        _contexts(families),
        "## Coverage",
        *_coverage(families),
        "## Maps",
        f"The feature vectors of at most {_MAP_ROWS:,} rows of each family in two dimensions by "
        "t-SNE (van der Maaten & Hinton, 2008), coloured by label.",
        *(f"![Map of {family}](map_{family}.png)" for family in judged),
        "## Implausible rows",
        _findings(rows),
        "## Licence and credit",
        _credit(rows),
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in pictures.items():
            content = BytesIO()
            figure.savefig(content, format="png", dpi=_DPI, metadata={"Software": None})
            replace_file(out / f"{name}.png", content.getvalue())
        replace_file(out / CARD_NAME, ("\n\n".join(parts) + "\n").encode())
    except OSError as error:
        raise DatasetError(f"{out} cannot be written: {error.strerror}") from None
    return [out / CARD_NAME, *(out / f"{name}.png" for name in pictures)]


def _by_family(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """The rows of each family that has any, in the order of
    :data:`~gpumemnet.job.training_job.FAMILIES`."""
    families = {family: [row for row in rows if row.job.family == family] for family in FAMILIES}
    return {family: family_rows for family, family_rows in families.items() if family_rows}


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a Markdown table; columns after the first are right-aligned."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _counts(rows: Sequence[Measurement], families: Families) -> str:
    groups = [
        (family, recipe, [row for row in family_rows if row.recipe == recipe])
        for family, family_rows in families.items()
        for recipe in sorted({row.recipe for row in family_rows})
    ]
    lines = []
    for family, recipe, group in [*groups, ("all", "", rows)]:
        statuses = Counter(row.status for row in group)
        counts = [*(statuses[status] for status in STATUSES), len(group)]
        counts.append(len({row.architecture_key for row in group}))
        lines.append([family, recipe, *(f"{count:,}" for count in counts)])
    return table(["family", "recipe", *STATUSES, "rows", "architectures"], lines)


def _sources(rows: Sequence[Measurement]) -> str:
    sources = Counter((row.label_source, row.protocol or "–") for row in rows)
    return table(
        ["label source", "protocol", "reads", "rows"],
        [
            [f"`{source}`", f"`{protocol}`", _SOURCES[source], f"{count:,}"]
            for (source, protocol), count in sorted(sources.items())
        ],
    )


def _stacks(rows: Sequence[Measurement]) -> str:
    names = ("gpu", "driver", "cuda", "cudnn", "torch", "allocator_settings", "provenance")
    stacks = Counter(tuple(getattr(row, name) or "–" for name in names) for row in rows)
    heading = ["GPU", "driver", "CUDA", "cuDNN", "torch", "allocator settings", "provenance"]
    return table(
        [*heading, "rows"], [[*stack, f"{count:,}"] for stack, count in sorted(stacks.items())]
    )


def _by_gpu(families: Families) -> Iterable[tuple[str, str, list[Measurement]]]:
    for family, family_rows in families.items():
        for gpu in sorted({row.gpu for row in family_rows}):
            yield family, gpu, [row for row in family_rows if row.gpu == gpu]


def _labels(families: Families) -> str:
    lines = []
    for family, gpu, rows in _by_gpu(families):
        labels = np.array([row.label_bytes for row in rows if row.label_bytes], dtype=np.int64)
        if not len(labels):
            continue
        capacity = max(row.capacity_bytes for row in rows)
        octaves = label_octaves(labels, capacity)
        empty = ", ".join(octave.name for octave in empty_octaves(octaves, capacity)) or "none"
        amounts = [*np.quantile(labels, (0.0, 0.5, 1.0)), capacity]
        lines.append([family, gpu, f"{len(labels):,}", *map(format_bytes, amounts), empty])
    heading = ["family", "GPU", "labels", "least", "median", "most", "free when idle"]
    return table([*heading, "octaves without labels below 75 %"], lines)


def _contexts(families: Families) -> str:
    lines = []
    for family, gpu, rows in _by_gpu(families):
        known = [row.context_bytes for row in rows if row.context_bytes]
        if known:
            quantiles = np.quantile(known, (0.0, 0.05, 0.5, 0.95, 1.0))
            lines.append([family, gpu, f"{len(known):,}", *map(format_bytes, quantiles)])
    return table(["family", "GPU", "rows", "least", "5 %", "median", "95 %", "most"], lines)


def _coverage(families: Families) -> Iterable[str]:
    yield (
        f"Limits: no tenth of a number's range, in logarithms, above {TENTH_LIMIT:.0%} of the rows; "
        f"no choice above {CHOICE_LIMIT:g} times its even share. Features with one value and real "
        "models of test-only recipes are left out."
    )
    heading = ["feature", "rows", "values", "fullest", "share", "limit", ""]
    for family, family_rows in families.items():
        found = spreads(row for row in family_rows if row.recipe != ZOO)
        above = sum(not spread.within for spread in found)
        yield f"**{family}**: {len(found)} features, {above} above their limit."
        yield table(heading, map(_spread_line, found))


def _spread_line(spread: Spread) -> list[str]:
    return [
        spread.feature,
        f"{spread.rows:,}",
        spread.ends if spread.is_range else f"{len(spread.cells)} choices",
        spread.fullest,
        f"{max(spread.cells):.1%}",
        f"{spread.limit:.1%}",
        "" if spread.within else "**above**",
    ]


def _findings(rows: Sequence[Measurement]) -> str:
    findings = Counter(finding.rule for finding in implausible_rows(rows))
    return table(
        ["rule", "rows"], [[rule, f"{count:,}"] for rule, count in sorted(findings.items())]
    )


def _credit(rows: Sequence[Measurement]) -> str:
    published = sum(row.provenance == "published" for row in rows)
    parts = [f"* {len(rows) - published:,} rows: the licence of the project that ships this file."]
    if published:
        parts.append(
            f"* {published:,} published rows: GPUMemNet, IT University of Copenhagen "
            "(github.com/itu-rad/GPUMemNet, arXiv 2602.17817), under [CC BY 4.0](https://creativecommons.org/licenses/by/4.0/). "
            "Changed: brought into this schema, and the layers of every network written as it really has them (the parameter of "
            "a PReLU, no output of an identity)."
        )
    return "\n".join(parts)


def label_picture(families: Families) -> Figure:
    """Labels of every family by quarter octaves; jobs that ran out of memory are at the memory that
    they had."""
    figure = _figure(13.0, 0.7 + 2.3 * len(families))
    panels = figure.subplots(len(families), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (family, rows) in zip(panels, families.items(), strict=True):
        labels = [np.log2(row.label_bytes) for row in rows if row.label_bytes]
        bounds = [np.log2(row.capacity_bytes) for row in rows if row.status == "oom"]
        edges = np.arange(np.floor(min(labels + bounds)), max(labels + bounds) + 0.5, 0.25)
        names = (f"label ({len(labels):,})", f"out of memory: more than this ({len(bounds):,})")
        axes.hist(
            [labels, bounds],
            edges,
            stacked=True,
            color=[_COLOURS[family], _OOM_COLOUR],
            label=names,
        )
        axes.set(title=family, ylabel="rows")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    panels[-1].xaxis.set_major_formatter(lambda exponent, _: format_bytes(2.0**exponent))
    panels[-1].set_xlabel("GPU memory")
    return figure


def map_picture(family: str, rows: Sequence[Measurement], seed: int = 0) -> Figure:
    """t-SNE of the feature vectors of at most 1,000 rows, coloured by label; out of memory are
    crosses."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    picked = np.random.default_rng(seed).permutation(len(rows))[:_MAP_ROWS]
    chosen = [rows[index] for index in sorted(picked)]
    points = scaled_features([row.job for row in chosen])
    if len(chosen) > _FEWEST_EMBEDDED and points.shape[1] > 1:
        neighbours = min(_PERPLEXITY, (len(chosen) - 1) / 3)
        # threads wait for each other on cores that other processes use
        with threadpool_limits(1):
            embedding = TSNE(perplexity=neighbours, init="pca", random_state=seed)
            points = embedding.fit_transform(points)
    else:
        points = np.pad(points, ((0, 0), (0, 1)))[:, :2]
    labels = np.array([row.label_bytes or 0 for row in chosen], dtype=np.float64)
    fits = labels > 0
    x, y = points[:, 0], points[:, 1]
    figure = _figure(9.0, 5.4)
    axes = figure.subplots()
    axes.scatter(x[~fits], y[~fits], marker="x", color=_OOM_COLOUR, s=14, label="out of memory")
    dots = axes.scatter(x[fits], y[fits], c=np.log2(labels[fits]), cmap="cividis", s=10)
    figure.colorbar(dots, label="label", format=lambda exponent, _: format_bytes(2.0**exponent))
    axes.set(title=f"{family}: t-SNE of the feature vectors", xticks=[], yticks=[])
    axes.legend(frameon=False)
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


def _figure(width: float, height: float) -> Figure:
    """A figure without pyplot, which shares no state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
