"""The request and the result of a retraining."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..training.plan_file import FoundPlan

RETRAINED: Final = ("mlp", "transformer")
"""Encoders that are retrained, each for one family; a model that families have in common is not."""
PROMOTED: Final = 0
FAILED: Final = 1
NOTHING_BETTER: Final = 10
"""Exit codes; 2 is the user's error, as everywhere."""


class RetrainingError(Exception):
    """A failure that no input caused, in one sentence; the champion is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One retraining.

    Attributes:
        datasets, observations: files to learn from, in this order.
        registry: the registry's folder; ``None`` only for a dry run against the shipped bundles.
        work: folder of the steps' results and of the reports.
        encoders: which classifiers to train.
        seed, epochs: of the plans; their own epochs unless given.
        plans: found by a search, at most one for a family and encoder; the project's own for the
            others.
        is_dry_run: whether the registry is left alone.
        as_challenger: whether what is better becomes challenger and not champion.
    """

    datasets: tuple[Path, ...]
    observations: tuple[Path, ...]
    registry: Path | None
    work: Path
    encoders: tuple[str, ...] = ("mlp",)
    seed: int = 0
    epochs: int | None = None
    plans: tuple[FoundPlan, ...] = ()
    is_dry_run: bool = False
    as_challenger: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a retraining.

    Attributes:
        exit_code: of the command.
        sentence: for people.
        release: the release that was made, or would have been.
        report: the report in Markdown.
        document: the report as data.
    """

    exit_code: int
    sentence: str
    release: str | None
    report: Path
    document: dict[str, Any]
