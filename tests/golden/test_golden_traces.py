"""Golden traces: what training the example models takes, byte by byte, when ``traces.json`` was
written by ``make.py``.

Bytes depend on the operators that PyTorch runs, so they are those of one version of it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gpumemnet

HERE = Path(__file__).parent
TORCH = "2.13.0"

if torch.__version__.split("+")[0] != TORCH:
    pytest.skip(f"the golden traces are of PyTorch {TORCH}", allow_module_level=True)


def example(name: str) -> Path:
    """The one file of this name among the example models, wherever they lie."""
    (found,) = HERE.parent.rglob(f"examples/{name}")
    return found


NAMES = {
    name: name
    for name in (
        *(
            "model",
            "gpu",
            "batch_size",
            "loss",
            "ranks",
            "expected_bytes",
            "safe_bytes",
            "parts",
            "reserved_bytes",
        ),
        *("allocated_bytes", "requested_bytes", "context_bytes", "smallest_bytes"),
    )
}
"""Golden name → name in an answer, in Python as in JSON."""

IMAGES, TOKENS = (3, 224, 224), (256,)
GPT2 = {"vocabulary": 8000, "context": 256, "width": 512, "depth": 4, "heads": 8}
Case = tuple[Path, str, dict[str, Any], tuple[int, ...], dict[str, Any]]
"""File, factory and its arguments, shape of one sample, options of the trace."""

PYTHON_CASES: dict[str, Case] = {
    "resnet50 amp_bf16": (
        example("resnet50.py"),
        "build",
        {},
        IMAGES,
        {"batch_size": 32, "precision": "amp_bf16"},
    ),
    "resnet50 benchmark": (
        *(example("resnet50.py"), "build", {}, IMAGES),
        {
            "batch_size": 8,
            "optimizer": "sgd_momentum",
            "channels_last": True,
            "cudnn_benchmark": True,
            "gpu": "A100",
        },
    ),
    "vit bf16": (
        example("vit.py"),
        "build",
        {},
        IMAGES,
        {"batch_size": 8, "precision": "bf16", "optimizer": "adafactor"},
    ),
    "unet amp_fp16": (
        *(example("unet.py"), "build", {"width": 32, "depth": 4}, (3, 128, 128)),
        {"batch_size": 4, "precision": "amp_fp16", "optimizer": "rmsprop", "gpu": "T4"},
    ),
    "gpt2": (example("gpt2.py"), "build", {}, (1024,), {"batch_size": 2, "optimizer": "adam"}),
    "gpt2 checkpointing": (
        example("gpt2.py"),
        "build",
        GPT2,
        TOKENS,
        {"batch_size": 8, "checkpointing": "every_block"},
    ),
    "gpt2 accumulation": (
        *(example("gpt2.py"), "build", GPT2, TOKENS),
        {
            "batch_size": 8,
            "gradient_accumulation": 2,
            "zero_grad": "after_step",
            "attention_kernel": "math",
        },
    ),
    **{
        f"gpt2 {optimizer} {implementation}": (
            *(example("gpt2.py"), "build", GPT2, TOKENS),
            {"batch_size": 8, "optimizer": optimizer, "optimizer_implementation": implementation},
        )
        for optimizer, implementation in (
            *(
                ("sgd", "default"),
                ("sgd_momentum", "for_loop"),
                ("adagrad", "foreach"),
                ("adamw", "fused"),
            ),
            *(("adam", "for_loop"), ("rmsprop", "default"), ("adafactor", "default")),
        )
    },
}
COMMAND_CASES: dict[str, list[str]] = {
    "script": [str(example("scripts/mixed.py")), "--gpu", "T4"],
    "replicas": [
        *(
            f"{example('gpt2.py')}:build",
            "--batch-size",
            "4",
            "--input",
            "256:int64",
            "--precision",
            "amp_fp16",
        ),
        *("--parallel", "ddp", "--ranks", "8"),
        *(word for name, value in GPT2.items() for word in ("--arg", f"{name}={value}")),
    ],
}
CASES = (*PYTHON_CASES, *COMMAND_CASES)


def traced(name: str) -> dict[str, Any]:
    """The totals of a trace and the parts of its peak, by golden names."""
    if name in COMMAND_CASES:
        words = [sys.executable, "-m", "gpumemnet", "trace", *COMMAND_CASES[name], "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        return {golden: answer[place] for golden, place in NAMES.items()}
    file, factory, arguments, sample, options = PYTHON_CASES[name]
    dtype = torch.long if len(sample) == 1 else torch.float32
    with torch.device("meta"):
        model = getattr(_loaded(file), factory)(**arguments)
        inputs = torch.zeros(options["batch_size"], *sample, dtype=dtype)
    answer = gpumemnet.trace(model, inputs, **options)
    return {golden: getattr(answer, place) for golden, place in NAMES.items()}


def _loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"golden_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CASES)
def test_a_trace(name: str) -> None:
    assert traced(name) == json.loads((HERE / "traces.json").read_text())[name]
