"""The accuracy that GPUMemNet reports for its two encoders (arXiv 2602.17817, tables 2–4), for
comparison.

Its jobs ran on one A100 and its test rows are its own, so the figures are a goal and not a
comparison on equal rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from research.report.figures import Section


@dataclass(frozen=True, slots=True)
class PublishedAccuracy:
    """Accuracy of one published encoder: bin scheme's name → share."""

    encoder: str
    accuracy: Mapping[str, float]

    @property
    def name(self) -> str:
        """For a person."""
        return f"as published by GPUMemNet (its own split), {self.encoder}"


PUBLISHED_ACCURACY: Final[Mapping[str, tuple[PublishedAccuracy, ...]]] = {
    "mlp": (
        PublishedAccuracy("MLP-based", {"published-1000mib": 0.95, "published-2000mib": 0.97}),
        PublishedAccuracy(
            "transformer-based", {"published-1000mib": 0.97, "published-2000mib": 0.98}
        ),
    ),
    "cnn": (
        PublishedAccuracy("MLP-based", {"published-8000mib": 0.82}),
        PublishedAccuracy("transformer-based", {"published-8000mib": 0.81}),
    ),
    "transformer": (
        PublishedAccuracy("MLP-based", {"published-8000mib": 0.87}),
        PublishedAccuracy("transformer-based", {"published-8000mib": 0.85}),
    ),
}
"""Family → what was published for it."""


def published_beside(section: Section) -> tuple[PublishedAccuracy, ...]:
    """The published figures for a section with measured labels of one family; none for other
    sections and for the zoo."""
    families = {job.family for job in section.jobs}
    if not section.is_measured or section.names or len(families) != 1:
        return ()
    return PUBLISHED_ACCURACY[families.pop()]
