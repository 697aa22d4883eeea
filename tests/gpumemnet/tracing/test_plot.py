"""The pictures of a trace."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from gpumemnet.errors import InvalidRequestError
from gpumemnet.tracing import ExtraResults, TraceAnswer, trace
from gpumemnet.tracing.plot import plot, step_bands


@pytest.fixture(scope="module")
def answer() -> TraceAnswer:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 30 * 30, 10),
    )
    extras = ExtraResults(curve=True, batches=(1, 2, 64))
    return trace(model, torch.empty(32, 3, 32, 32, device="meta"), optimizer="adam", extras=extras)


def test_the_bands_at_the_peak_are_the_answers_parts(answer: TraceAnswer) -> None:
    bands = step_bands(answer)
    cached = bands.pop("fragmentation")
    used = np.sum([*bands.values()], axis=0)
    at_peak = {part: int(band[used.argmax()]) for part, band in bands.items()}
    assert at_peak == {name: size for name, size in answer.parts.items() if name in at_peak}
    assert sum(at_peak.values()) == sum(answer.parts.values()) - answer.parts["fragmentation"]
    assert (used + cached).max() == answer.expected_bytes
    assert (cached >= 0).all()


def test_a_png_is_a_picture(answer: TraceAnswer, tmp_path: Path) -> None:
    plot(answer, tmp_path / "memory.png")
    head = (tmp_path / "memory.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:])
    assert width > 1000
    assert height > 500
    assert list(tmp_path.iterdir()) == [tmp_path / "memory.png"]


def test_an_svg_names_the_bands(answer: TraceAnswer, tmp_path: Path) -> None:
    plot(answer, tmp_path / "memory.svg")
    assert ElementTree.parse(tmp_path / "memory.svg").getroot().tag.endswith("svg")


def test_other_files_and_answers_without_a_curve(answer: TraceAnswer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="plot: must end in"):
        plot(answer, tmp_path / "memory.gif")
    with pytest.raises(InvalidRequestError, match="no curve"):
        plot(replace(answer, curve=None), tmp_path / "memory.png")
    assert not list(tmp_path.iterdir())
