"""Ordinary networks, through ``gpumemnet extract FILE:FACTORY | gpumemnet predict -`` in two
calls."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gpumemnet
from gpumemnet.cli import main
from gpumemnet.extract import ExtractOptions, extract_job
from tests.gpumemnet.extract.examples import ordinary
from tests.nightly import nightly

FACTORIES = (
    "residual_cnn",
    "language_model",
    *nightly(("language_model_written_out", "perceptron")),
)


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_ordinary_network_gets_a_limit_that_covers_its_trace(
    factory: str, examples: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    source = f"{examples / 'ordinary.py'}:{factory}"
    assert main(["extract", source, "--optimizer", "adam", "--out", str(path)]) == 0
    assert "no limit" not in capfd.readouterr().out
    assert main(["predict", str(path), "--gpu", "A100-40GB", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    model, inputs = getattr(ordinary, factory)()
    traced = gpumemnet.trace(model, inputs, optimizer="adam", gpu="A100-40GB")
    assert answer["safe_bytes"] >= traced.expected_bytes
    assert answer["expected_bytes"] < 5 * traced.expected_bytes


def kernel(precision: str, gpu: str = "A100", heads: int = 4) -> str | None:
    model = nn.Sequential(nn.Linear(128, 128), ordinary.Attention(128, heads, written=False))
    return extract_job(
        model, torch.zeros(2, 16, 128), ExtractOptions(precision=precision, gpu=gpu)
    ).job.attention_kernel


def test_the_attention_kernel_is_the_one_that_pytorch_would_choose() -> None:
    assert kernel("fp32") == "memory_efficient"
    assert kernel("amp_bf16") == kernel("bf16") == "flash"
    assert kernel("amp_bf16", gpu="V100") != "flash"
    assert kernel("fp32", heads=64) == "math"  # heads of two elements
    written, ids = ordinary.language_model_written_out()
    assert extract_job(written, ids).job.attention_kernel == "math"


def test_a_gelu_written_out_keeps_more_than_the_module() -> None:
    job, written = (
        extract_job(
            nn.Sequential(nn.Linear(64, 64), activation, nn.Linear(64, 64)), torch.zeros(4, 64)
        ).job
        for activation in (nn.GELU(), ordinary.WrittenGelu())
    )
    assert [layer.kind for layer in job.layers] == ["linear", "gelu", "linear"]
    kinds = [layer.kind for layer in written.layers]
    assert kinds == [
        "linear",
        "other",
        "activation",
        "other",
        "add",
        "other",
        "tanh",
        "other",
        "multiply",
        "linear",
    ]


def test_a_traced_job_names_the_optimizer_that_was_given() -> None:
    from gpumemnet.tracing.api import ExtraResults

    model, inputs = ordinary.perceptron()
    for made, expected in (
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), ("adamw", "fused")),
        (
            lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
            ("sgd_momentum", "default"),
        ),
        (torch.optim.SGD(model.parameters(), 0.1), ("sgd", "default")),
    ):
        job = gpumemnet.trace(model, inputs, optimizer=made, extras=ExtraResults(job=True)).job
        assert job is not None
        assert (job["optimizer"], job["optimizer_implementation"]) == expected
