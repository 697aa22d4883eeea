"""The device probe: its real stages on the CPU, the real parent with stand-in stages, and all of it
where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset_builder.measure.device_probe import (
    CONTEXT_STAGES,
    WORKSPACE_STAGES,
    probe_device,
    write_profile,
)
from dataset_builder.measure.device_stages import STAGES, run_stage
from dataset_builder.measure.fork_server import ForkServer
from dataset_builder.measure.nvml import visible_meters
from gpumemnet.errors import InvalidRequestError, MeasurementError
from gpumemnet.gpu import context, find_profile, load_profile
from gpumemnet.planner.costs import find_machine
from gpumemnet.units import MIB
from tests.dataset_builder.measure.rehearsal.stand_in import StandInMeter

REHEARSAL = Path(__file__).with_name("rehearsal")
ROOT = Path(__file__).parents[3]

Rehearse = Callable[..., dict[str, Any]]


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Probes a stand-in card: ``rehearse(mode, **behaviour by stage)``."""
    monkeypatch.syspath_prepend(REHEARSAL)
    monkeypatch.setenv("STAND_IN_FOLDER", str(tmp_path))

    def run(mode: str = "process", **behaviour: str) -> dict[str, Any]:
        (tmp_path / "held").mkdir(exist_ok=True)
        (tmp_path / "behaviour.json").write_text(json.dumps(behaviour))
        with closing(ForkServer("stand_in_stages:measure")) as server:
            return probe_device(server, StandInMeter(tmp_path, mode))

    return run


@pytest.mark.parametrize("mode", ["process", "container", "device", "accounting"])
def test_the_context_is_what_the_process_has_beside_what_it_reserved(
    mode: str, rehearse: Rehearse
) -> None:
    document = rehearse(mode)
    contexts = {reading["stage"]: reading["context_bytes"] for reading in document["contexts"]}
    assert contexts == {
        "allocation": 400 * MIB,
        "matmul": 420 * MIB,
        "convolution": 460 * MIB,
        "attention": 410 * MIB,
        "training": 490 * MIB,
    }
    assert document["profile"]["context_bytes"] == 490 * MIB  # a training job's
    assert document["profile"]["blas_workspace_bytes"] == 32 * MIB
    assert document["stack"]["torch"] == "stand-in"
    assert document["convolutions"]


def test_only_a_measurement_is_accepted_as_a_profile(rehearse: Rehearse, tmp_path: Path) -> None:
    document, path = rehearse(), tmp_path / "profile.json"
    write_profile(document, path)
    with pytest.raises(InvalidRequestError, match="was not measured on a GPU"):
        load_profile(path)
    write_profile(document | {"provenance": "measured"}, path)
    profile = find_profile(str(path))
    assert (profile.name, profile.multiprocessors, profile.compute_capability) == (
        "stand-in",
        132,
        (9, 0),
    )
    assert context(profile).expected_bytes == 490 * MIB
    assert context(profile).source.startswith(
        "measured: probe (nvml_process) after training steps; driver 0, CUDA 0"
    )
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == [
        "behaviour.json",
        "profile.json",
    ]


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (
            {"matmul": "error"},
            "a probing process could not use the GPU: no kernel for the stand-in card",
        ),
        ({"attention": "crash"}, "a probing process could not use the GPU: it died"),
        ({"convolution": "lies"}, f"cannot be trusted: {MIB} bytes, with {64 * MIB} reserved"),
        (
            {"blas_workspaces": "no_workspace"},
            "did not grow with the first matrix product: unset CUBLAS_WORKSPACE_CONFIG",
        ),
    ],
)
def test_a_host_that_cannot_measure_is_one_sentence(
    behaviour: dict[str, str], sentence: str, rehearse: Rehearse
) -> None:
    with pytest.raises(MeasurementError) as raised:
        rehearse(**behaviour)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_readings_that_follow_nothing_are_refused(rehearse: Rehearse) -> None:
    with pytest.raises(MeasurementError, match="no reading of stand-in can be trusted"):
        rehearse("blind")


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="cannot be written: No such file or directory"):
        write_profile({}, tmp_path / "absent" / "profile.json")


@pytest.mark.parametrize("stage", ["matmul", "convolution", "attention", "training"])
def test_the_stages_that_load_kernels_run(stage: str) -> None:
    assert run_stage(stage, torch.device("cpu")) == {}


def test_parent_and_child_know_the_same_stages() -> None:
    assert (*CONTEXT_STAGES, *WORKSPACE_STAGES) == tuple(STAGES)


def probed(out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dataset_builder", "probe", "--out", str(out)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )


def no_gpu() -> str | None:
    """The sentence that says why there is no GPU."""
    try:
        visible_meters()
    except MeasurementError as error:
        return str(error)
    return None


def test_without_a_gpu_it_is_one_sentence_and_no_file(tmp_path: Path) -> None:
    reason = no_gpu()
    if reason is None:
        pytest.skip("this machine has a GPU")
    done = probed(tmp_path / "profile.json")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {reason}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_the_profile_of_a_real_gpu(tmp_path: Path) -> None:
    reason = no_gpu()
    if reason is not None:
        pytest.skip(reason)
    out = tmp_path / "profile.json"
    done = probed(out)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(out.read_text())
    meter = visible_meters()[0]
    assert document["provenance"] == meter.provenance
    if meter.provenance == "measured":
        assert load_profile(out).name == meter.gpu.name
        machine = find_machine(out)
        assert machine.flops_per_second["fp16"] > machine.flops_per_second["fp32"] > 1e12
        assert machine.memory_bytes_per_second > machine.to_host_bytes_per_second > 1e9
    else:
        with pytest.raises(InvalidRequestError, match="rehearsal"):
            load_profile(out)
    profile = document["profile"]
    contexts = {reading["stage"]: reading["context_bytes"] for reading in document["contexts"]}
    assert 50 * MIB < contexts["allocation"] <= contexts["training"] < 3 * 1024 * MIB
    assert profile["context_bytes"] == contexts["training"]
    workspace = 32 * MIB if profile["compute_capability"] >= [9, 0] else 8_519_680
    found = document["blas_workspaces"]
    assert (found["forward_bytes"], found["backward_bytes"]) == (workspace, workspace)
    assert found["bias_epilogue_bytes"] in (
        0,
        MIB,
    )  # cuBLASLt has a workspace of its own before torch 2.13
    assert (
        sum("workspace_bytes" in row for row in document["convolutions"])
        > len(document["convolutions"]) // 2
    )
