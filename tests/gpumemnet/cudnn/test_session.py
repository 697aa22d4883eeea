"""Asking cuDNN: finding it, the child process, and its crashes; a stand-in child takes the place of
cuDNN."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpumemnet.cudnn.execution_plans import (
    FORWARD,
    ConvolutionQuestion,
    device_description,
)
from gpumemnet.cudnn.session import (
    LIBRARY,
    CudnnSession,
    CudnnUnavailableError,
    find_library,
    open_session,
)
from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import device_profile, device_profiles
from tests.gpumemnet.cudnn.stand_in_child import answer_questions, ends_at_once

A100 = device_profile("A100")


def question(batch: int) -> ConvolutionQuestion:
    return ConvolutionQuestion(
        operation=FORWARD,
        image=(batch, 64, 56, 56),
        weight=(64, 64, 3, 3),
        result=(batch, 64, 56, 56),
        channels_last=False,
        dtype="float32",
        padding=(1, 1),
        stride=(1, 1),
        dilation=(1, 1),
    )


def session(folder: Path, name: str = "log") -> CudnnSession:
    return CudnnSession(folder / name, answer_questions)


def asked(folder: Path) -> int:
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_plans_arrive_in_the_order_of_cudnn(tmp_path: Path) -> None:
    cudnn = session(tmp_path)
    plans = cudnn.plans(A100, question(2))
    assert cudnn.version == "9.28.0"
    assert plans is not None
    assert [plan.engine for plan in (*plans.heuristic, *plans.fallback)] == [1, 2, 3]
    cudnn.close()


def test_pytorch_rejects_plans_by_their_arithmetic(tmp_path: Path) -> None:
    plans = session(tmp_path).plans(A100, question(2))
    assert plans is not None
    assert [plan.engine for plan in plans.for_pytorch("float32", tf32=True)] == [2, 3]
    assert [plan.engine for plan in plans.for_pytorch("float32", tf32=False)] == [3]
    assert [plan.engine for plan in plans.for_pytorch("float16", tf32=True)] == [1, 2, 3]


def test_an_answer_is_asked_for_once(tmp_path: Path) -> None:
    cudnn = session(tmp_path)
    assert cudnn.plans(A100, question(2)) == cudnn.plans(A100, question(2))
    assert asked(tmp_path) == 1
    cudnn.plans(device_profile("H100"), question(2))
    assert asked(tmp_path) == 2, "another GPU is another question"


def test_a_crash_costs_one_answer(tmp_path: Path) -> None:
    cudnn = session(tmp_path)
    assert cudnn.plans(A100, question(13)) is None
    assert cudnn.plans(A100, question(2)) is not None
    assert asked(tmp_path) == 2


def test_after_three_crashes_nothing_is_asked_any_more(tmp_path: Path) -> None:
    cudnn = session(tmp_path)
    for stride in (1, 2, 3, 4):
        assert cudnn.plans(A100, replace(question(13), stride=(stride, stride))) is None
    assert asked(tmp_path) == 3
    assert cudnn.plans(A100, question(2)) is None


def test_a_refusal_is_remembered(tmp_path: Path) -> None:
    cudnn = session(tmp_path)
    assert cudnn.plans(A100, question(14)) is None
    assert cudnn.plans(A100, question(14)) is None
    assert asked(tmp_path) == 1


def test_cudnn_9_28_is_not_asked_about_volta(tmp_path: Path) -> None:
    assert session(tmp_path).plans(device_profile("V100"), question(2)) is None
    assert asked(tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "reason"), [("old", "cuDNN 9.1.0 is installed"), ("missing", "libcublasLt.so.12")]
)
def test_a_library_that_cannot_answer_says_why(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(CudnnUnavailableError, match=reason):
        session(tmp_path, name)


def test_a_child_that_ends_at_once_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(CudnnUnavailableError, match="ended"):
        CudnnSession(tmp_path / "log", ends_at_once)


def installed(folder: Path) -> Path:
    library = folder / "nvidia" / "cudnn" / "lib" / LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    return library


def test_auto_finds_the_wheel_beside_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_library("auto") == library


def test_a_path_may_be_the_library_or_its_folder_or_site_packages(tmp_path: Path) -> None:
    library = installed(tmp_path)
    assert (
        find_library(str(library))
        == find_library(str(library.parent))
        == find_library(str(tmp_path))
        == library
    )


def test_off_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_library("off") is None
    assert open_session("off") == (None, "")


def test_a_path_without_cudnn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"cudnn: no libcudnn\.so\.9 at"):
        find_library(str(tmp_path))


def test_a_library_that_is_none_is_an_error_only_if_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(tmp_path)
    with pytest.raises(InvalidRequestError, match="cudnn: cuDNN cannot be loaded"):
        open_session(str(library))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    session, reason = open_session("auto")
    assert session is None
    assert "cannot be loaded" in reason


def test_every_gpu_of_the_catalogue_is_described() -> None:
    assert [device.name for device in device_profiles() if device_description(device) is None] == []


def test_the_description_holds_what_cudnn_reads() -> None:
    described = device_description(device_profile("T4"))
    assert described is not None
    assert (described["deviceVer"], described["multiProcessorCount"]) == (750, 40)
    assert (described["maxThreadsPerSM"], described["maxSharedMemoryPerBlockOptin"]) == (
        1024,
        65536,
    )
    assert "comment" not in described


def test_without_a_c_compiler_the_reason_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequestError, match="a C compiler is needed: install gcc or clang"):
        open_session(str(library))
