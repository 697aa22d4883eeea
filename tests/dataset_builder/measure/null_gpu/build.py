"""Build the null GPU for the PyTorch that is installed, and start commands on it.

``python tests/dataset_builder/measure/null_gpu/build.py FOLDER`` needs gcc, nm, a CUDA build of
PyTorch with its pip packages, and the toolkit's headers (``CUDA_HOME``).  It writes three
libraries; :func:`environment` says with which variables a command runs on them.  By default
convolutions take no workspace; with :func:`cudnn_environment` cuDNN states what they take.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SLOTS = 4096


@dataclass(frozen=True, slots=True)
class Answer:
    """A library in place of NVIDIA's: its ``sources``, and functions that do nothing for what else
    its ``askers`` call."""

    library: str
    sources: tuple[str, ...]
    names: str = "(?!)"
    askers: tuple[str, ...] = ()


ANSWERS = (
    Answer(
        "libnull_cuda.so",
        ("null_cuda.c", "null_libraries.c", "null_cudnn.c", "null_driver.c"),
        r"(?:__)?(?:cuda|cublas|cudnn)[A-Z]\w*",
        (
            "libtorch_cuda.so",
            "libc10_cuda.so",
            "libtorch_python.so",
            "libtorch_cuda_linalg.so",
            "libtorch_nvshmem.so",
        ),
    ),
    Answer("libcuda.so.1", ("null_driver.c",), r"cu[A-Z]\w*", ("libcaffe2_nvrtc.so",)),
    Answer("libnvidia-ml.so.1", ("null_nvml.c",)),
)


@dataclass(frozen=True, slots=True)
class NullGpu:
    """A card that exists on paper: sizes in bytes, and what its NVML tells."""

    total_bytes: int = 150_754_820_096
    driver_bytes: int = 600 * 2**20
    context_bytes: int = 524 * 2**20
    lists: bool = True


def build(folder: Path) -> None:
    """Compile the libraries into ``folder``.

    Raises:
        subprocess.CalledProcessError: when the compiler refuses; its message is on standard error.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    packages = Path(torch.__file__).parents[1]
    headers = [
        packages / "nvidia" / "cu13" / "include",
        packages / "nvidia" / "cudnn" / "include",
        toolkit_headers(),
    ]
    for answer in ANSWERS:
        sources = [HERE / name for name in answer.sources]
        written = {
            name for source in sources for name in re.findall(answer.names, source.read_text())
        }
        libraries = [
            path for name in answer.askers if (path := packages / "torch" / "lib" / name).exists()
        ]
        wanted = {
            name
            for path in libraries
            for name in _undefined(path)
            if re.fullmatch(answer.names, name)
        }
        rest = folder / f"{answer.library}.c"
        rest.write_text(
            "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(wanted - written))
        )
        command = [
            "gcc",
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-shared",
            "-fPIC",
            *(f"-I{each}" for each in [*headers, HERE]),
        ]
        subprocess.run(
            [*command, "-o", folder / answer.library, *sources, HERE / "state.c", rest], check=True
        )


def toolkit_headers() -> Path:
    """Where the CUDA toolkit's headers are."""
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"


def environment(folder: Path, gpu: NullGpu = NullGpu(), card: str = "state") -> dict[str, str]:
    """The variables of a command that runs on ``gpu``, empty at first; commands of another ``card``
    do not share it."""
    state = folder / card
    header = struct.pack("<4Q", gpu.total_bytes, gpu.driver_bytes, gpu.context_bytes, gpu.lists)
    state.write_bytes(header + bytes(SLOTS * struct.calcsize("<qQ")))
    return {
        "LD_PRELOAD": str(folder / "libnull_cuda.so"),
        "LD_LIBRARY_PATH": str(folder),
        "NULL_GPU_STATE": str(state),
    }


def cudnn_environment(library: Path) -> dict[str, str]:
    """Return further variables with which cuDNN, from 9.8 on, states the plans of convolutions and
    their workspaces.

    Args:
        library: the file ``libcudnn.so.9``.
    """
    from gpumemnet.cudnn.execution_plans import device_description
    from gpumemnet.gpu import device_profile

    return {
        "NULL_GPU_CUDNN": str(library),
        "NULL_GPU_CUDNN_DEVICE": json.dumps(device_description(device_profile("H200"))),
    }


def _undefined(library: Path) -> list[str]:
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1].partition("@")[0] for line in listed.splitlines()]


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(" ".join(f"{name}={value}" for name, value in environment(Path(sys.argv[1])).items()))
