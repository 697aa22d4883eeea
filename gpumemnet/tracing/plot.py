"""Draws the memory over one training step in steady state, stacked by class, with matplotlib; the
file's suffix selects PNG, SVG or PDF."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import write_output
from gpumemnet.errors import InvalidRequestError, check_installed
from gpumemnet.job.layers import describe
from gpumemnet.tracing.result import PART_NAMES, TraceAnswer, shown_mib
from gpumemnet.units import GIB, ceil_mib

PICTURES: Final = (".png", ".svg", ".pdf")
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
INK, UNUSED, AVAILABLE = "#000000", "#eeeeee", "#D55E00"


def step_bands(answer: TraceAnswer) -> dict[str, NDArray[np.int64]]:
    """Return the bytes of each part after each event of the step, from the bottom up, the CUDA context
    first and what the allocator caches last; parts without bytes are left out.

    Raises:
        InvalidRequestError: the answer has no curve.
    """
    curve = answer.curve
    if curve is None or not curve.reserved_bytes:
        raise InvalidRequestError(
            "the answer has no curve; trace with ExtraResults(curve=True)", "plot"
        )
    reserved = np.array(curve.reserved_bytes)
    rows = {
        part: np.array(row) for part, row in zip(curve.classes, curve.bytes_by_class, strict=True)
    }
    for part in ("context", "communicator"):
        rows[part] = np.full_like(reserved, answer.parts[part])
        reserved = reserved + rows[part]
    bands = {part: rows[part] for part in COLOURS if part in rows and rows[part].any()}
    return {**bands, "fragmentation": reserved - sum(bands.values())}


def plot(answer: TraceAnswer, path: Path) -> None:
    """Write the chart of ``answer`` to ``path`` atomically.

    Args:
        answer: the result of a trace, with a curve.
        path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidRequestError: another suffix, an answer without a curve, or a file that cannot be
            written.
        MissingExtraError: matplotlib is not installed.
    """
    form, bands = picture_format(path), step_bands(answer)
    gpu = answer.gpu if answer.ranks == 1 else f"one of {answer.ranks:,} x {answer.gpu}"
    title = f"{answer.model}, batch size {answer.batch_size:,}, on {gpu}"
    check_installed("matplotlib", "plot", "drawing a picture")
    from matplotlib import style
    from matplotlib.figure import Figure

    lines = ("safe", answer.safe_bytes, INK), ("available", answer.available_bytes, AVAILABLE)
    heights = np.array([*bands.values()])
    peak = heights[:-1].sum(axis=0).argmax()
    content = BytesIO()
    with style.context("default"):
        figure = Figure(figsize=(10, 5.2))
        axes = figure.subplots()
        axes.stackplot(
            np.arange(heights.shape[1]),
            heights / GIB,
            step="post",
            labels=[
                f"{amount:,} {PART_NAMES[part]}"
                for part, amount in zip(bands, shown_mib(heights[:, peak].tolist()), strict=True)
            ],
            colors=[COLOURS.get(part, UNUSED) for part in bands],
        )
        for name, amount, colour in lines:
            label = f"{ceil_mib(amount):,} {name}"
            axes.axhline(amount / GIB, color=colour, linestyle="dashed", label=label)
        for name, start in answer.curve.phases if answer.curve else ():
            axes.axvline(start, color=INK, linewidth=0.8, linestyle="dotted")
            axes.text(start, 1.01, f" {name}", transform=axes.get_xaxis_transform())
        axes.margins(x=0)
        axes.set_xlabel("allocations and frees of one training step, in order")
        axes.set_ylabel("GiB")
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
            frameon=False,
            title="MiB at the peak",
            reverse=True,
        )
        axes.set_title(shorten(title, 90, placeholder=" …"), pad=20, parse_math=False)
        figure.savefig(content, format=form, bbox_inches="tight", dpi=130)
    write_output(path, content.getvalue(), "plot")


def picture_format(path: Path) -> str:
    """Return the format of a picture's suffix.

    Raises:
        InvalidRequestError: another suffix.
    """
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise InvalidRequestError(
            f"must end in {' or '.join(PICTURES)}, not {describe(path.name)}", "plot"
        )
    return suffix[1:]
