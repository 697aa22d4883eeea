"""The probe of a GPU: the real parent with a stand-in process, its training run on the CPU, and all
of it where there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dataset_builder.measure.nvml import visible_meters
from dataset_builder.measure.training import small_training_run
from gpumemnet.cli import main
from gpumemnet.errors import InvalidRequestError, MeasurementError
from gpumemnet.gpu import context, find_profile, load_profile
from gpumemnet.units import MIB

REHEARSAL = Path(__file__).with_name("rehearsal")
ROOT = Path(__file__).parents[3]


def rehearse(
    folder: Path, mode: str = "process", behaviour: str = "ok"
) -> subprocess.CompletedProcess[str]:
    """Probe a stand-in card."""
    (folder / "held").mkdir()
    (folder / "behaviour.json").write_text(json.dumps({"profile": behaviour}))
    command = [sys.executable, str(REHEARSAL / "rehearse.py"), str(folder), mode, "probe"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "STAND_IN_FOLDER": str(folder)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("mode", ["process", "device"])
def test_the_context_is_what_the_process_has_beside_what_it_reserved(
    mode: str, tmp_path: Path
) -> None:
    document = json.loads(rehearse(tmp_path, mode).stdout)
    assert document["profile"]["context_bytes"] == 490 * MIB  # a training job's
    assert document["profile"]["blas_workspace_bytes"] == 32 * MIB
    assert document["stack"]["torch"] == "stand-in"


def test_only_a_measurement_is_accepted_as_a_profile(tmp_path: Path) -> None:
    document, path = json.loads(rehearse(tmp_path).stdout), tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidRequestError, match="was not measured on a GPU"):
        load_profile(path)
    path.write_text(json.dumps(document | {"provenance": "measured"}))
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


@pytest.mark.parametrize(
    ("mode", "behaviour", "sentence"),
    [
        ("process", "error", "could not use the GPU: no kernel for the stand-in card"),
        ("process", "crash", "could not use the GPU: the process ended with exit code 7"),
        ("process", "lies", f"cannot be trusted: {MIB} bytes, with {64 * MIB} reserved"),
        ("process", "no_workspace", "did not grow with the first matrix product"),
        ("blind", "ok", "no reading of stand-in can be trusted"),
    ],
)
def test_a_host_that_cannot_measure_is_one_sentence(
    mode: str, behaviour: str, sentence: str, tmp_path: Path
) -> None:
    done = rehearse(tmp_path, mode, behaviour)
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "probe", "--out", str(tmp_path / "absent" / "profile.json")]) == 2
    assert (
        capsys.readouterr().err == f"error: out: the folder {tmp_path / 'absent'} does not exist\n"
    )


def test_the_training_run_that_loads_kernels_runs() -> None:
    small_training_run(torch.device("cpu"))


@pytest.mark.gpu
def test_the_profile_of_a_real_gpu(tmp_path: Path) -> None:
    try:
        meter = visible_meters()[0]
    except MeasurementError as error:
        pytest.skip(str(error))
    out = tmp_path / "profile.json"
    command = [sys.executable, "-m", "dataset_builder", "probe", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(out.read_text())
    assert document["provenance"] == meter.provenance
    if meter.provenance == "measured":
        assert load_profile(out).name == meter.gpu.name
    else:
        with pytest.raises(InvalidRequestError, match="rehearsal"):
            load_profile(out)
    profile = document["profile"]
    assert 50 * MIB < profile["context_bytes"] < 3 * 1024 * MIB
    assert profile["blas_workspace_bytes"] >= MIB
