"""The real measuring child behind the real fork server, as far as it comes without a GPU."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dataset_builder.families import mlp
from dataset_builder.measure import channel
from dataset_builder.measure.child import measure, note_statistics, process_ids, software_stack
from dataset_builder.measure.fork_server import ForkServer
from dataset_builder.recipe.planned_job import Options, PlannedJob
from gpumemnet.errors import MeasurementError


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    started = ForkServer()
    yield started
    started.close()


def finish(server: ForkServer, pid: int) -> int:
    """The exit code of a child."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        ended = server.exits()
        if pid in ended:
            return ended[pid]
        time.sleep(0.01)
    raise AssertionError("the child did not end")


def answer_all(end: socket.socket) -> list[dict[str, object]]:
    messages = []
    while (message := channel.receive(end)) is not None:
        messages.append(message)
        channel.send(end, {"go": True})
    return messages


def test_a_child_that_cannot_use_a_gpu_says_why(server: ForkServer) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    architecture = mlp.MlpArchitecture(
        shape="uniform", input_width=3, output_width=2, hidden_widths=(4,), activation="relu"
    )
    request = {
        "planned": PlannedJob("mlp", architecture, Options(batch_size=2)).to_dict(),
        "seed": 0,
        "visible": "none",
    }
    pid, end = server.start(request)
    with end:
        started, result = answer_all(end)
    assert started["event"] == "started"
    assert started["pids"] == [pid]
    assert started["stack"] == software_stack()
    assert (result["event"], result["status"]) == ("result", "error")
    assert "CUDA" in str(result["reason"]) or "NVIDIA driver" in str(
        result["reason"]
    )  # PyTorch without CUDA, and with it
    assert finish(server, pid) == 0


def test_a_child_exits_when_its_parent_is_gone(server: ForkServer) -> None:
    pid, end = server.start({"planned": {}, "seed": 0, "visible": "none"})
    end.close()
    assert finish(server, pid) == 3
    assert not Path(f"/proc/{pid}").exists()


def test_a_fork_server_that_cannot_start_is_one_sentence() -> None:
    with pytest.raises(MeasurementError, match="did not start"):
        ForkServer("no.such.module:measure")


def test_the_peaks_of_all_phases_are_kept() -> None:
    noted: dict[str, int] = {}
    for peak, retries in ((5, 0), (9, 1), (2, 3)):
        note_statistics(
            {"requested_bytes.all.peak": peak, "num_alloc_retries": retries, "unknown": 1}, noted
        )
    assert noted == {"peak_requested_bytes": 9, "alloc_retries": 3}


def test_a_process_reports_its_own_id() -> None:
    assert os.getpid() in process_ids()


def told(request: dict[str, object]) -> list[dict[str, object]]:
    """What :func:`measure` says, run here."""
    ours, theirs = channel.channel_pair()
    messages: list[dict[str, object]] = []
    with ours, theirs:
        parent = threading.Thread(target=lambda: messages.extend(answer_all(ours)))
        parent.start()
        measure(request, theirs)
        theirs.close()
        parent.join()
    return messages


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        ("CUDA error: out of memory", "oom"),
        ("CUDNN_STATUS_ALLOC_FAILED", "oom"),
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":1407',
            "oom",
        ),
        ("CUDA error: an illegal memory access was encountered", "error"),
    ],
)
def test_failures_that_mean_out_of_memory(
    failure: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError(failure)

    monkeypatch.setattr(torch.cuda, "init", fails)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    *_, result = told({"visible": "", "probe_bytes": 1})
    assert (result["event"], result["status"]) == ("result", status)
    assert str(result["reason"]).startswith(failure[:30])


def test_a_wrong_cudnn_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses() -> None:
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against another")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuses)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [result] = told({"visible": "", "probe_bytes": 1})
    assert (result["event"], result["status"]) == ("result", "error")
    assert "cuDNN version incompatibility" in str(result["reason"])
