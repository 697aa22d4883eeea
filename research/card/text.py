"""Writes the text and tables of a data card in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Final

import numpy as np

from dataset_builder.split import TEST_ONLY_RECIPES
from gpumemnet.job.measurement import STATUSES, Measurement
from gpumemnet.site.validation import validate
from gpumemnet.units import format_bytes

from .coverage import (
    CHOICE_LIMIT,
    TENTH_LIMIT,
    Octave,
    Spread,
    empty_octaves,
    label_octaves,
)
from .figures import MAP_ROWS

Families = Mapping[str, Sequence[Measurement]]

_SOURCES: Final[Mapping[str, str]] = {
    "nvml_accounting": "the driver's accounting statistics: the process's exact maximum",
    "nvml_process": "the driver's used memory of the process, read after every step and every 20 ms between",
    "nvml_device_difference": "used memory of the whole device less its idle reading, one job at a time",
    "nvidia_smi_device_1s": "the largest of one-second `nvidia-smi` readings of the whole device",
}
_MARKS: Final = {True: "", False: "**above**"}


def card_text(
    name: str,
    digest: str,
    families: Families,
    spreads: Mapping[str, Sequence[Spread]],
    pictures: Set[str],
) -> str:
    """The whole card.

    Args:
        name: the dataset's file name.
        digest: SHA-256 of the file.
        families: its rows by family.
        spreads: :func:`~research.card.coverage.spreads` of the sampled rows of every family.
        pictures: names of the pictures that lie beside the card.
    """
    rows = list(chain.from_iterable(families.values()))
    parts = [
        f"# Data card of {name}",
        f"Written by `python -m research card {name}` from the file with SHA-256 `{digest}`.",
        "## Contents",
        _contents(rows, families),
        _counts(families),
        "## How it was measured",
        _method(rows),
        _stacks(rows),
        "## Labels",
        _labels(families, pictures),
        "## Coverage",
        _coverage(spreads, pictures),
        "## Growth of memory",
        _growth(pictures),
        "## Context bytes",
        _context(families, pictures),
        "## Maps",
        _maps(families, pictures),
        "## Findings of `validate`",
        _findings(rows),
        "## Licence and credit",
        _credit(rows),
        "## Known limits",
        _limits(rows, families, spreads),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sampled_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Rows whose features were chosen by a sampler: all except the real models of test-only
    recipes."""
    return [row for row in rows if row.recipe not in TEST_ONLY_RECIPES]


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a Markdown table; columns after the first are right-aligned."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _contents(rows: Sequence[Measurement], families: Families) -> str:
    architectures = len({row.architecture_key for row in rows})
    return (
        f"{len(rows):,} training jobs of {len(families)} {'family' if len(families) == 1 else 'families'} and {architectures:,} "
        "architectures, each run once on a GPU. A row holds what a scheduler could know of the job, and the memory that it took. "
        "A job that ran out of memory has no label; it needed more than its `capacity_bytes`. "
        f"{sum(row.history is not None for row in rows):,} rows name a recorded history of the caching allocator."
    )


def _counts(families: Families) -> str:
    lines = []
    for family, family_rows in families.items():
        for recipe in sorted({row.recipe for row in family_rows}):
            rows = [row for row in family_rows if row.recipe == recipe]
            statuses = Counter(row.status for row in rows)
            architectures = len({row.architecture_key for row in rows})
            lines.append(
                [
                    family,
                    recipe,
                    *(f"{statuses[status]:,}" for status in STATUSES),
                    f"{len(rows):,}",
                    f"{architectures:,}",
                ]
            )
    total = Counter(row.status for row in chain.from_iterable(families.values()))
    lines.append(
        ["all", "", *(f"{total[status]:,}" for status in STATUSES), f"{total.total():,}", ""]
    )
    return table(["family", "recipe", *STATUSES, "rows", "architectures"], lines)


def _method(rows: Sequence[Measurement]) -> str:
    sources = Counter((row.label_source, row.protocol or "–") for row in rows)
    source_lines = [
        f"* {count:,} rows, label source `{source}`, protocol `{protocol}`: {_SOURCES[source]}"
        for (source, protocol), count in sorted(sources.items())
    ]
    labels = (
        "The label is the peak of the process's memory as the driver sees it: CUDA context, libraries and everything that the "
        "caching allocator had reserved. Every job ran in a fresh process."
    )
    return "\n".join([labels, "", *source_lines])


def _stacks(rows: Sequence[Measurement]) -> str:
    stacks = Counter(
        (
            row.gpu,
            row.driver or "–",
            row.cuda or "–",
            row.cudnn or "–",
            row.torch or "–",
            row.allocator_settings or "–",
            row.provenance,
        )
        for row in rows
    )
    heading = [
        "GPU",
        "driver",
        "CUDA",
        "cuDNN",
        "torch",
        "allocator settings",
        "provenance",
        "rows",
    ]
    return table(heading, [[*stack, f"{count:,}"] for stack, count in sorted(stacks.items())])


def _labels(families: Families, pictures: Set[str]) -> str:
    parts = []
    for family, family_rows in families.items():
        for gpu in sorted({row.gpu for row in family_rows}):
            rows = [row for row in family_rows if row.gpu == gpu]
            labels = np.array([row.label_bytes for row in rows if row.label_bytes], dtype=np.int64)
            if not len(labels):
                continue
            capacity = max(row.capacity_bytes for row in rows)
            octaves = label_octaves(labels, capacity)
            empty = empty_octaves(octaves, capacity)
            low, median, high = (
                format_bytes(quantile) for quantile in np.quantile(labels, (0.0, 0.5, 1.0))
            )
            sentence = f"**{family} on {gpu}** ({format_bytes(capacity)} free when idle): {low} to {high}, median {median}. "
            sentence += f"The largest label is {labels.max() / capacity:.0%} of that; "
            sentence += (
                f"empty octaves below 75 %: {', '.join(octave.name for octave in empty) or 'none'}."
            )
            parts += [
                sentence,
                table(["label", "rows", "share"], _octave_lines(octaves, len(labels))),
            ]
    return "\n\n".join([*parts, _picture("labels", "labels of every family", pictures)])


def _octave_lines(octaves: Iterable[Octave], total: int) -> list[list[str]]:
    kept = [octave for octave in octaves if octave.low_bytes or octave.rows]
    return [[octave.name, f"{octave.rows:,}", f"{octave.rows / total:.1%}"] for octave in kept]


def _coverage(spreads: Mapping[str, Sequence[Spread]], pictures: Set[str]) -> str:
    parts = [
        f"Limits: no tenth of a number's observed range, in logarithms, above {TENTH_LIMIT:.0%} of the rows; no choice above "
        f"{CHOICE_LIMIT:g} times its even share. A list counts as its length and its largest number; a whole number is shared "
        "out evenly up to the next; a feature with one value only is left out, and so are real models of test-only recipes."
    ]
    for family, family_spreads in spreads.items():
        lines = [
            [
                spread.feature,
                f"{spread.rows:,}",
                spread.ends if spread.is_range else f"{len(spread.cells)} choices",
                spread.fullest,
                f"{max(spread.cells):.1%}",
                f"{spread.limit:.1%}",
                _MARKS[spread.within],
            ]
            for spread in family_spreads
        ]
        above = sum(not spread.within for spread in family_spreads)
        parts.append(f"**{family}**: {len(family_spreads)} features, {above} above their limit.")
        parts.append(table(["feature", "rows", "values", "fullest", "share", "limit", ""], lines))
        parts.append(
            _picture(f"coverage_{family}", f"coverage of every feature of {family}", pictures)
        )
    return "\n\n".join(parts)


def _growth(pictures: Set[str]) -> str:
    if "growth" not in pictures:
        return "No row has a label."
    text = (
        "Memory grows in steps, because the caching allocator takes whole segments of 2 and 20 MiB from the driver. The panels "
        "on the right show the smallest jobs, where a step is as high as the tensors."
    )
    return f"{text}\n\n{_picture('growth', 'growth of memory', pictures)}"


def _context(families: Families, pictures: Set[str]) -> str:
    if "context" not in pictures:
        return "No row states its context bytes."
    lines = []
    for family, rows in families.items():
        for gpu in sorted({row.gpu for row in rows}):
            known = [row.context_bytes for row in rows if row.gpu == gpu and row.context_bytes]
            if known:
                quantiles = (
                    format_bytes(quantile)
                    for quantile in np.quantile(known, (0.0, 0.05, 0.5, 0.95, 1.0))
                )
                lines.append([family, gpu, f"{len(known):,}", *quantiles])
    heading = ["family", "GPU", "rows", "least", "5 %", "median", "95 %", "most"]
    return (
        table(heading, lines)
        + "\n\n"
        + _picture("context", "context bytes of every family", pictures)
    )


def _maps(families: Families, pictures: Set[str]) -> str:
    links = [_picture(f"map_{family}", f"maps of {family}", pictures) for family in families]
    text = (
        f"The feature vectors of at most {MAP_ROWS:,} rows of each family in two dimensions: principal components, and t-SNE "
        "(van der Maaten & Hinton, 2008), coloured by label."
    )
    return "\n\n".join([text, *links]) if any(links) else "No row has a label."


def _findings(rows: Sequence[Measurement]) -> str:
    findings = Counter(finding.rule for finding in validate(rows))
    if not findings:
        return "None."
    return table(
        ["rule", "rows"], [[rule, f"{count:,}"] for rule, count in sorted(findings.items())]
    )


def _credit(rows: Sequence[Measurement]) -> str:
    provenances = Counter(row.provenance for row in rows)
    parts = []
    if provenances["measured"]:
        parts.append(
            f"* {provenances['measured']:,} measured rows: the licence of the project that ships this file."
        )
    if provenances["published"]:
        parts.append(
            f"* {provenances['published']:,} published rows: GPUMemNet, IT University of Copenhagen "
            "(github.com/itu-rad/GPUMemNet, arXiv 2602.17817), under [CC BY 4.0](https://creativecommons.org/licenses/by/4.0/). "
            "Changed: brought into this schema, and the layers of every network written as it really has them (the parameter of "
            "a PReLU, no output of an identity)."
        )
    return "\n".join(parts)


def _limits(
    rows: Sequence[Measurement], families: Families, spreads: Mapping[str, Sequence[Spread]]
) -> str:
    gpus = sorted({row.gpu for row in rows})
    limits = []
    if len(gpus) == 1:
        limits.append(f"One GPU model, {gpus[0]}: context bytes and workspaces of others differ.")
    stacks = {(row.driver, row.cuda, row.torch) for row in rows}
    if (None, None, None) in stacks:
        limits.append("The software stack of some rows is not known.")
    elif len(stacks) == 1:
        limits.append(
            "One software stack: another driver or torch moves the context, and sometimes the allocator."
        )
    if any(row.label_source == "nvidia_smi_device_1s" for row in rows):
        limits.append(
            "Labels read once a second from the whole device miss short peaks, hold everything else on that device, "
            "and do not separate context from tensors."
        )
    if not any(row.status == "oom" for row in rows):
        limits.append(
            "No job ran out of memory: nothing is known about jobs above the largest label."
        )
    for family, members in families.items():
        for field in ("optimizer", "precision"):
            used = {getattr(row.job, field) for row in members}
            if len(used) == 1:
                limits.append(f"{family}: one {field} only, `{used.pop()}`.")
    for family, family_spreads in spreads.items():
        crowded = [spread.feature for spread in family_spreads if not spread.within]
        if crowded:
            limits.append(f"{family}: crowded features are {', '.join(crowded)}.")
    failed = sum(row.status in ("timeout", "error") for row in rows)
    if failed:
        limits.append(f"{failed:,} jobs timed out or failed: these rows say nothing about memory.")
    limits.append(
        "One process on one GPU: no data, tensor or pipeline parallelism, no `torch.compile`, no data loader."
    )
    return "\n".join(f"* {limit}" for limit in limits)


def _picture(name: str, words: str, pictures: Set[str]) -> str:
    return f"![{words}]({name}.png)" if name in pictures else ""
