"""Traces whose convolution workspaces come from cuDNN; a stand-in child lists plans in its
place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gpumemnet
from gpumemnet.cudnn import session as sessions
from gpumemnet.cudnn.session import CudnnSession
from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import device_profile
from gpumemnet.tracing.api import ExtraResults
from gpumemnet.units import MIB
from tests.gpumemnet.cudnn.stand_in_child import answer_questions

BATCH = 8


@pytest.fixture
def cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudnnSession]:
    opened = CudnnSession(tmp_path / "log", answer_questions)
    monkeypatch.setattr(sessions, "_session", lambda library, process: opened)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    library = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    library.parent.mkdir(parents=True)
    library.touch()
    yield opened
    opened.close()


def images(batch: int = BATCH) -> Tensor:
    return torch.empty(batch, 16, 32, 32, device="meta")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    ).to("meta")


def test_the_first_plan_that_pytorch_takes_is_in_the_answer(cudnn: CudnnSession) -> None:
    answer = gpumemnet.trace(network(), images(), loss="mean", gpu="A100", cudnn="auto")
    assert answer.convolution_workspaces == "cuDNN 9.28.0"
    curve = gpumemnet.trace(
        network(), images(), loss="mean", gpu="A100", cudnn="auto", extras=ExtraResults(curve=True)
    ).curve
    assert curve is not None
    assert max(curve.bytes_by_class[curve.classes.index("workspace")]) == 1_000_000 * BATCH


def test_nothing_is_asked_unless_requested(cudnn: CudnnSession, tmp_path: Path) -> None:
    answer = gpumemnet.trace(network(), images(), loss="mean", gpu="A100")
    assert answer.convolution_workspaces == "rules"
    assert not (tmp_path / "log").exists()


def test_a_model_without_convolutions_has_no_source_of_workspaces(cudnn: CudnnSession) -> None:
    answer = gpumemnet.trace(
        nn.Linear(8, 8).to("meta"), torch.empty(4, 8, device="meta"), loss="mean", cudnn="auto"
    )
    assert answer.convolution_workspaces is None


def test_what_cudnn_cannot_answer_comes_from_rules(cudnn: CudnnSession) -> None:
    by_rules = gpumemnet.trace(network(), images(14), loss="mean", gpu="A100")
    refused = gpumemnet.trace(network(), images(14), loss="mean", gpu="A100", cudnn="auto")
    assert refused.expected_bytes == by_rules.expected_bytes


def test_a_gpu_that_this_version_does_not_know_is_answered_by_rules_with_a_note(
    cudnn: CudnnSession,
) -> None:
    answer = gpumemnet.trace(network(), images(), loss="mean", gpu="V100", cudnn="auto")
    assert answer.convolution_workspaces == "rules"
    assert any("cuDNN 9.28.0 does not know Tesla V100" in note for note in answer.notes)


def test_the_search_takes_the_largest_plan_that_the_gpu_holds_and_gives_it_back(
    cudnn: CudnnSession,
) -> None:
    answer = gpumemnet.trace(
        network(), images(), loss="mean", gpu="A100", cudnn_benchmark=True, cudnn="auto"
    )
    plain = gpumemnet.trace(network(), images(), loss="mean", gpu="A100", cudnn="auto")
    searching, steady = answer.startup_peak_bytes, plain.startup_peak_bytes
    assert searching is not None
    assert steady is not None
    assert searching >= steady + 30 * MIB  # 40,000,000 bytes instead of 8,000,000
    assert answer.expected_bytes <= plain.expected_bytes
    small = replace(device_profile("A100"), name="small", capacity_bytes=30_000_000)
    assert gpumemnet.trace(
        network(), images(), loss="mean", gpu=small, cudnn_benchmark=True, cudnn="auto"
    ).peak


def test_depthwise_convolutions_of_pytorch_itself_are_not_asked_for(
    cudnn: CudnnSession, tmp_path: Path
) -> None:
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16).to("meta")
    gpumemnet.trace(depthwise, images(), loss="mean", gpu="A100", cudnn="auto")
    assert not (tmp_path / "log").exists()


def test_a_path_without_cudnn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cudnn: no libcudnn"):
        gpumemnet.trace(network(), images(), cudnn=str(tmp_path))
