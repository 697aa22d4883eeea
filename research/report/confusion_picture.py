"""The confusion matrix of a section's candidate: where its bins are wrong, and by how much.

Colour is the share of each row, because most jobs are small and counts would leave the rows of
large jobs pale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from models.evaluation.metrics import confusion
from research.report.figures import NO_ANSWER, Section, judged_rows, label_word, predicted_bins
from research.report.pictures import new_figure, shown_bins, width_name

from .tables import share

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def confusion_picture(section: Section) -> Figure | None:
    """Bins of the labels (rows) against those of the candidate (columns), counts in the cells;
    ``None`` without answers."""
    scheme, classes = shown_bins(section)
    rows = judged_rows(section)
    predicted = predicted_bins(section.answers[section.candidate], scheme)[rows]
    answered = predicted != NO_ANSWER
    if not answered.any():
        return None
    square = confusion(section.label_bytes[rows][answered], predicted[answered], scheme)
    right = square.diagonal().sum() / len(rows)
    counts, names = square[:classes, :classes], [str(index) for index in range(classes)]
    columns = list(names)
    if len(square) > classes:
        counts, columns = (
            np.column_stack([counts, square[:classes, classes:].sum(axis=1)]),
            [*names, "above"],
        )
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = new_figure(max(4.6, 1.6 + 0.27 * classes))
    figure.set_layout_engine("compressed")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 9 if classes <= 12 else 6.5
    for row, column in zip(*counts.nonzero(), strict=True):
        colour = "white" if shares[row, column] > 0.5 else "black"
        axes.text(
            column,
            row,
            f"{counts[row, column]:,}",
            ha="center",
            va="center",
            color=colour,
            fontsize=size,
        )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(classes), names)
    if len(columns) > classes:
        axes.get_xticklabels()[-1].set_rotation(90)
    axes.set(xlabel=f"bin of {section.candidate}", ylabel=f"bin of the {label_word(section)} label")
    title = f"bins of {width_name(scheme)}, bin k from k times that width: {share(right)} of {len(rows):,} jobs right"
    figure.suptitle(title, fontsize=11)
    figure.colorbar(image, ax=axes, label="share of the row", shrink=0.8, pad=0.02)
    return figure
