"""The report as files: ``report.md`` for people, ``report.json`` with every figure for programs,
and the pictures.

Each file is written atomically, the report last, so that all pictures that it links to exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from research.report.figures import (
    CandidateFigures,
    CoveragePoint,
    Reliability,
    Section,
    candidate_figures,
    coverages,
    estimates,
    groupings,
    reliability,
)
from research.report.pictures import (
    baselines,
    confusion_picture,
    coverage_picture,
    png,
    reliability_picture,
    scatter_picture,
    write_whole,
)

from .tables import (
    LEGEND,
    TRACED,
    bin_table,
    byte_table,
    group_table,
    model_table,
    published_beside,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT: Final = 1
"""Version of ``report.json``."""
Draw = Callable[[], "Figure | None"]


def write_report(
    sections: Sequence[Section],
    folder: Path,
    *,
    notes: Sequence[str] = (),
    appendix: Sequence[str] = (),
) -> list[Path]:
    """Write the report of ``sections`` into ``folder``, which is created if necessary.

    Args:
        sections: the sections in the order of the report; their slugs are unique and name the
            pictures.
        folder: the report's folder.
        notes: sentences for the top of the report.
        appendix: Markdown for the end of the report.

    Returns:
        The paths of all files: ``report.md``, ``report.json``, and the pictures.

    Raises:
        ValueError: when two sections share a slug, or a section's candidate has no answers.
    """
    slugs = [section.slug for section in sections]
    if len(set(slugs)) < len(slugs):
        raise ValueError(
            f"two sections share a slug ({', '.join(slugs)}): pictures would overwrite each other"
        )
    for section in sections:
        if section.candidate not in section.answers:
            raise ValueError(
                f"{section.slug} has no answers of its candidate {section.candidate!r}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    text = ["# Evaluation of the estimators\n", *(f"{note}\n" for note in notes), f"{LEGEND}\n"]
    documents = []
    for section in sections:
        section_text, document, drawn = _section(section, folder)
        text += section_text
        documents.append(document)
        pictures += drawn
    text += [f"{part}\n" for part in appendix]
    content = {
        "format": FORMAT,
        "notes": list(notes),
        "sections": documents,
    }
    figures = json.dumps(_without_nan(content), indent=2, allow_nan=False) + "\n"
    written = [*pictures, write_whole(folder / "report.json", figures.encode())]
    return [write_whole(folder / "report.md", "\n".join(text).encode()), *reversed(written)]


def _section(section: Section, folder: Path) -> tuple[list[str], dict[str, Any], list[Path]]:
    """A section's text, figures and pictures."""
    figures = {candidate: candidate_figures(section, candidate) for candidate in section.answers}
    grouped = {
        word: {
            group.name: candidate_figures(section, section.candidate, group.rows)
            for group in groups
        }
        for word, groups in groupings(section).items()
    }
    bin_reliability, coverage_points = (
        reliability(section, section.candidate),
        coverages(section, section.candidate),
    )
    judged = next(iter(figures.values())).jobs
    kind = "" if section.is_measured else " (labels traced, not measured)"
    text = [f"## {section.title}{kind}\n", f"{section.about}\n", _judged(section, judged)]
    paths: list[Path] = []
    if judged:
        text += _tables(section, figures, grouped)
        links, paths = _pictures(section, folder, figures, bin_reliability, coverage_points)
        text += links
    return (
        text,
        _document(section, figures, grouped, bin_reliability, coverage_points, paths),
        paths,
    )


def _judged(section: Section, judged: int) -> str:
    unjudged = len(section.jobs) - judged
    more = f" {unjudged:,} without a label (out of memory) are not judged." if unjudged else ""
    return f"{judged:,} jobs are judged, by models that had not seen them.{more}\n"


def _tables(
    section: Section,
    figures: Mapping[str, CandidateFigures],
    grouped: Mapping[str, Mapping[str, CandidateFigures]],
) -> list[str]:
    tables = {
        "Bins of all candidates": bin_table(section, figures),
        "Expected and safe bytes of all candidates": byte_table(section, figures),
        **({"Every estimate of the real models": model_table(section)} if section.names else {}),
        **{
            f"{section.candidate} by {word}": group_table(word, each)
            for word, each in grouped.items()
        },
    }
    text = []
    for heading, table in tables.items():
        text += [f"### {heading}\n", *([] if section.is_measured else [f"{TRACED}\n"]), table]
    return text


def _pictures(
    section: Section,
    folder: Path,
    figures: Mapping[str, CandidateFigures],
    bin_reliability: Reliability | None,
    coverage_points: Sequence[CoveragePoint],
) -> tuple[list[str], list[Path]]:
    candidate = section.candidate
    shown = [candidate, *baselines(section, figures)]
    pictures: dict[str, tuple[str, Draw]] = {
        "confusion": (f"confusion matrix of {candidate}", lambda: confusion_picture(section)),
        "scatter": (
            f"expected against {'measured' if section.is_measured else 'traced'} memory",
            lambda: scatter_picture(section, shown),
        ),
        "reliability": (
            f"reliability of {candidate}",
            lambda: (
                reliability_picture(candidate, bin_reliability)
                if bin_reliability and sum(bin_reliability.jobs)
                else None
            ),
        ),
        "coverage": (
            f"coverage of the bounds of {candidate}",
            lambda: coverage_picture(candidate, coverage_points) if coverage_points else None,
        ),
    }
    text: list[str] = []
    paths: list[Path] = []
    for word, (caption, draw) in pictures.items():
        links, drawn = _draw_file(
            folder, f"{section.slug}-{word}.png", f"{section.title}: {caption}", draw
        )
        text += links
        paths += drawn
    return (
        ["### Pictures\n", *([] if section.is_measured else [f"{TRACED}\n"]), *text] if text else []
    ), paths


def _draw_file(folder: Path, name: str, caption: str, draw: Draw) -> tuple[list[str], list[Path]]:
    """The link to a picture and its path, or nothing where there is nothing to draw."""
    figure = draw()
    if figure is None:
        return [], []
    path = write_whole(folder / name, png(figure))
    return [f"![{caption.replace('[', '(').replace(']', ')')}]({name})\n"], [path]


def _document(
    section: Section,
    figures: Mapping[str, CandidateFigures],
    grouped: Mapping[str, Mapping[str, CandidateFigures]],
    bin_reliability: Reliability | None,
    coverage_points: Sequence[CoveragePoint],
    pictures: Sequence[Path],
) -> dict[str, Any]:
    return {
        "slug": section.slug,
        "title": section.title,
        "about": section.about,
        "labels": "measured" if section.is_measured else "traced",
        "jobs": len(section.jobs),
        "candidate": section.candidate,
        "candidates": {
            name: {**asdict(each), "training_seconds": section.seconds.get(name, math.nan)}
            for name, each in figures.items()
        },
        "groups": {
            word: {name: asdict(each) for name, each in groups.items()}
            for word, groups in grouped.items()
        },
        "published": [
            {"encoder": encoder, "accuracy": accuracy}
            for encoder, accuracy in published_beside(section).items()
        ],
        "models": _models(section),
        "reliability": asdict(bin_reliability) if bin_reliability else None,
        "coverage": [asdict(each) for each in coverage_points],
        "pictures": [path.name for path in pictures],
    }


def _models(section: Section) -> list[dict[str, Any]]:
    """The label and every estimate of each real model, in bytes."""
    series = estimates(section) if section.names else {}
    return [
        {
            "model": name,
            "batch_size": job.batch_size,
            "bytes": {each: float(values[row]) for each, values in series.items()},
        }
        for row, (name, job) in enumerate(zip(section.names, section.jobs, strict=False))
    ]


def _without_nan(value: Any) -> Any:
    """``value`` with ``None`` for NaN, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
