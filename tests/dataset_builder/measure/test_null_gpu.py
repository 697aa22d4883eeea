"""A rehearsal of the builder on PyTorch's own CUDA code, without a GPU: see ``null_gpu/build.py``.

Only where PyTorch is built with CUDA, no GPU is at hand, and the toolkit's headers and a compiler
are installed.  Nothing here is a measurement, and no row of it becomes part of a dataset.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset_builder.measure.journal import read_journal
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import GIB, MIB
from tests.dataset_builder.measure.null_gpu.build import (
    NullGpu,
    build,
    cudnn_environment,
    environment,
    toolkit_headers,
)

SMALL_RECIPE = Path(__file__).parents[1] / "small_recipes" / "mlp.yaml"
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.version.cuda is None:
        pytest.skip("PyTorch is built without CUDA")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: run the tests marked gpu instead")
    missing = [each for each in ("gcc", "nm") if shutil.which(each) is None]
    if missing or not (toolkit_headers() / "crt" / "host_defines.h").is_file():
        pytest.skip(
            f"needs gcc, nm and the headers of the CUDA toolkit (CUDA_HOME), {toolkit_headers()} has none"
        )
    folder = tmp_path_factory.mktemp("null_gpu")
    build(folder)
    return folder


@pytest.fixture
def cudnn(libraries: Path) -> Path:
    library = Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    if not library.is_file():
        pytest.skip("cuDNN is not installed: its plans cannot be listed")
    return library


def run(libraries: Path, gpu: NullGpu, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    variables = os.environ | environment(libraries, gpu)
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500
    )


def campaign(
    libraries: Path, folder: Path, recipe: Path, gpu: NullGpu, jobs: int = 4
) -> list[Measurement]:
    done = run(
        libraries,
        gpu,
        "dataset_builder",
        "campaign",
        recipe,
        "--jobs",
        jobs,
        "--out",
        folder,
    )
    assert done.returncode == 2, done.stderr
    assert "measured nothing" in done.stderr
    assert not (folder / "dataset.parquet").exists()
    return list(read_journal(folder))


def test_the_gpu_tests_pass_on_it(libraries: Path) -> None:
    done = run(
        libraries,
        NullGpu(),
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "tests/dataset_builder",
    )
    assert done.returncode == 0, done.stdout
    assert " skipped" not in done.stdout


@pytest.mark.parametrize(
    ("gpu", "source"),
    [
        (NullGpu(), "nvml_process"),
        (NullGpu(lists=False), "nvml_device_difference"),
    ],
)
def test_labels_come_from_the_driver_s_readings(
    libraries: Path, tmp_path: Path, gpu: NullGpu, source: str
) -> None:
    rows = campaign(libraries, tmp_path / "c", SMALL_RECIPE, gpu)
    assert {(row.status, row.label_source, row.provenance) for row in rows} == {
        ("ok", source, "stand_in")
    }
    for row in rows:
        assert row.label_bytes is not None
        reserved = row.phases[-1].reserved_bytes
        assert abs(row.label_bytes - reserved - gpu.context_bytes) <= 2 * MIB


@pytest.mark.parametrize(
    ("family", "lists"), [("mlp", False), ("cnn", True), ("transformer", True)]
)
def test_a_full_card_is_out_of_memory(
    libraries: Path, tmp_path: Path, family: str, lists: bool
) -> None:
    recipe = tmp_path / "large.yaml"
    declared = (ROOT / "dataset_builder" / "recipes" / f"{family}.yaml").read_text()
    recipe.write_text(
        "\n".join(line for line in declared.splitlines() if not line.startswith("memory:"))
        + "\nmemory: {from: 60 GiB, to: 999 GiB}\n"
    )
    small = NullGpu(total_bytes=24 * GIB, lists=lists)
    rows = campaign(libraries, tmp_path / "c", recipe, small, 2)
    assert {row.status for row in rows} == {"oom"}


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="workspaces are those of torch 2.13"
)
@pytest.mark.parametrize(
    "script",
    [
        "prefetch",
        "ddp_torchrun",
        "ddp_spawn",
        "fully_sharded",
        "fully_sharded meta",
        "fully_sharded whole",
        "tensor_parallel",
        "tensor_parallel sharded",
    ],
)
def test_a_script_reserves_what_its_trace_says(libraries: Path, script: str) -> None:
    name, *arguments = script.split()
    path = str(ROOT / "tests" / "gpumemnet" / "tracing" / "examples" / "scripts" / f"{name}.py")
    real = peaks(libraries, {}, "8", path, *arguments)
    answer = trace(path, "--ranks", "8", "--", *arguments)
    assert real == [answer["requested_bytes"], answer["allocated_bytes"], answer["reserved_bytes"]]


CONVOLUTIONS = """
import torch
from torch import nn

torch.backends.cudnn.benchmark = {search}
model = nn.Sequential(
    nn.Conv2d(3, 64, 7, stride=2), nn.ReLU(), nn.Conv2d(64, 256, 1), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 128, 3),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    images, labels = torch.empty(64, 3, 160, 160, device="cuda"), torch.empty(64, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
"""


def test_the_trace_has_the_workspaces_that_pytorch_s_code_takes_from_cudnn(
    libraries: Path, cudnn: Path, tmp_path: Path
) -> None:
    path = tmp_path / "convolutions.py"
    path.write_text(CONVOLUTIONS.format(search=False))
    without, real = (
        peaks(libraries, {}, "1", path),
        peaks(libraries, cudnn_environment(cudnn), "1", path),
    )
    answer = trace(path, "--cudnn", cudnn)
    assert without[2] < real[2]
    assert real == [answer["requested_bytes"], answer["allocated_bytes"], answer["reserved_bytes"]]


def test_the_start_up_peak_is_that_of_pytorch_s_search(
    libraries: Path, cudnn: Path, tmp_path: Path
) -> None:
    path = tmp_path / "convolutions.py"
    path.write_text(CONVOLUTIONS.format(search=True))
    answer = trace(path, "--cudnn", cudnn)
    real = peaks(libraries, cudnn_environment(cudnn), "1", path)[2]
    # no kernel runs, so the plans that are fastest are others
    assert answer["startup_peak_bytes"] - answer["context_bytes"] == pytest.approx(real, rel=0.01)


def peaks(libraries: Path, variables: dict[str, str], *arguments: object) -> list[int]:
    """Requested, allocated and reserved bytes on the null GPU."""
    command = [
        sys.executable,
        "tests/dataset_builder/measure/null_gpu/first_rank.py",
        *map(str, arguments),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment(libraries) | variables,
        capture_output=True,
        text=True,
    )
    return list(json.loads(done.stdout.strip().splitlines()[-1].removeprefix("PEAKS")))


def trace(script: object, *arguments: object) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "gpumemnet",
        "trace",
        script,
        "--gpu",
        "H200",
        "--json",
        *arguments,
    ]
    return dict(
        json.loads(
            subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True).stdout
        )
    )
