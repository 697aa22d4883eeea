"""Draws the memory over one training step in steady state, stacked by class, with matplotlib; the
file's suffix selects PNG, SVG or PDF."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.atomic_files import write_output
from gpumemnet.errors import InvalidRequestError, check_installed
from gpumemnet.job.layers import describe
from gpumemnet.tracing.result import PART_NAMES, TraceAnswer, shown_mib
from gpumemnet.units import GIB, ceil_mib

if TYPE_CHECKING:
    import pandas as pd

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


def step_table(answer: TraceAnswer) -> pd.DataFrame:
    """Return the bytes of each part after events of the step, from the bottom up, the CUDA context
    first and what the allocator caches last; parts without bytes are left out.

    Raises:
        InvalidRequestError: the answer has no curve.
    """
    import pandas as pd

    curve = answer.curve
    if curve is None or not curve.reserved_bytes:
        raise InvalidRequestError(
            "the answer has no curve; trace with ExtraResults(curve=True)", "plot"
        )
    outside = {part: answer.parts[part] for part in ("context", "communicator")}
    parts = pd.DataFrame(dict(zip(curve.classes, curve.bytes_by_class, strict=True)))
    parts = parts.assign(**outside)
    parts = parts[[part for part in COLOURS if part in parts and parts[part].any()]]
    reserved = np.array(curve.reserved_bytes) + sum(outside.values())
    parts["fragmentation"] = reserved - parts.sum(axis=1)
    return parts


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
    form, table = picture_format(path), step_table(answer)
    gpu = answer.gpu if answer.ranks == 1 else f"one of {answer.ranks:,} x {answer.gpu}"
    title = f"{answer.model}, batch size {answer.batch_size:,}, on {gpu}"
    check_installed("matplotlib", "plot", "drawing a picture")
    from matplotlib import style
    from matplotlib.figure import Figure

    parts: list[str] = [*table]
    lines = ("safe", answer.safe_bytes, INK), ("available", answer.available_bytes, AVAILABLE)
    peak = int(table.drop(columns="fragmentation").sum(axis=1).argmax())
    content = BytesIO()
    with style.context("default"):
        figure = Figure(figsize=(10, 5.2))
        axes = figure.subplots()
        axes.stackplot(
            table.index,
            table.T / GIB,
            step="post",
            labels=[
                f"{amount:,} {PART_NAMES[part]}"
                for part, amount in zip(parts, shown_mib([*table.iloc[peak]]), strict=True)
            ],
            colors=[COLOURS.get(part, UNUSED) for part in parts],
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
