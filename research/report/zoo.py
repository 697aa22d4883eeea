"""Real models as in GPUMemNet's figure of unseen models (arXiv 2602.17817, section 6): measurements
and all estimates."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.units import MIB
from research.report.section import Section

from .canvas import label_word

_TRACE_WORD: Final = "trace"


def estimates(section: Section) -> dict[str, NDArray[np.float64]]:
    """Labels, the section's candidate, candidates that are traces, and what others published;
    bytes, shape ``[B]`` each."""
    traces = [
        name
        for name in section.answers
        if _TRACE_WORD in name.lower() and name != section.candidate
    ]
    return {
        label_word(section): section.label_bytes,
        **{name: section.answers[name].expected_bytes for name in (section.candidate, *traces)},
        **{name: values * MIB for name, values in section.others_mib.items()},
    }
