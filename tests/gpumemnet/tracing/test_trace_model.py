"""``gpumemnet.trace(model, inputs)``: the answer, its parts, and what else can be asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

import gpumemnet
from gpumemnet.allocator import AllocatorSettings
from gpumemnet.errors import InvalidJobError, InvalidRequestError
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.tracing import Questions, TraceAnswer, trace_model
from gpumemnet.tracing.report.answer import answer_from_dict, answer_to_dict
from gpumemnet.units import MIB


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 30 * 30, 10))


IMAGES = torch.empty(16, 3, 32, 32, device="meta")


@pytest.fixture(scope="module")
def answer() -> TraceAnswer:
    everything = Questions(batches=(1, 8, 64), max_batch=True, gpus=True, curve=True, job=True)
    return trace_model(network(), IMAGES, optimizer="adam", gpu="A100", questions=everything)


def test_the_package_is_the_function() -> None:
    answer = gpumemnet.trace(network(), IMAGES, optimizer="sgd", gpu="T4")
    assert answer.gpu == device_profile("T4").name


def test_importing_it_loads_no_torch() -> None:
    program = "import sys, gpumemnet, gpumemnet.tracing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_parts_add_up(answer: TraceAnswer) -> None:
    assert sum(answer.parts.values()) == answer.expected_bytes
    assert answer.parts["context"] == answer.context_bytes
    assert answer.expected_bytes == answer.reserved_bytes + answer.context_bytes
    assert all(size >= 0 for size in answer.parts.values())
    assert answer.parts["parameter"] == 4 * sum(p.numel() for p in network().parameters())
    assert answer.requested_bytes <= answer.allocated_bytes <= answer.reserved_bytes
    assert answer.reserved_bytes % (2 * MIB) == 0


def test_the_bound_is_above_and_the_smallest_below(answer: TraceAnswer) -> None:
    assert answer.smallest_bytes <= answer.expected_bytes < answer.safe_bytes
    assert answer.fits


def test_the_peak_is_explained(answer: TraceAnswer) -> None:
    assert answer.peak.phase in ("forward", "backward", "optimizer")
    held = sum(size for _, size in answer.peak.modules)
    assert held == answer.reserved_bytes - answer.parts["fragmentation"]
    assert [size for _, size in answer.peak.modules] == sorted((size for _, size in answer.peak.modules), reverse=True)
    assert {name for name, _ in answer.peak.modules} <= {"", "0", "1", "2", "3", "4"}


def test_batches_and_the_largest_that_fits(answer: TraceAnswer) -> None:
    expected = [point.expected_bytes for point in answer.batches]
    assert [point.batch_size for point in answer.batches] == [1, 8, 64]
    assert expected == sorted(expected)
    assert answer.max_batch_size is not None
    fits = trace_model(network(), IMAGES, optimizer="adam", gpu="A100", batch_size=answer.max_batch_size)
    beyond = trace_model(network(), IMAGES, optimizer="adam", gpu="A100", batch_size=answer.max_batch_size + 1)
    assert fits.safe_bytes <= answer.capacity_bytes < beyond.safe_bytes


def test_every_gpu_has_its_line(answer: TraceAnswer) -> None:
    own = next(fit for fit in answer.gpus if fit.gpu == answer.gpu)
    assert (own.expected_bytes, own.safe_bytes) == (answer.expected_bytes, answer.safe_bytes)
    for fit in answer.gpus:
        assert fit.fits == (fit.safe_bytes <= fit.capacity_bytes)


def test_the_curve_has_the_peak(answer: TraceAnswer) -> None:
    curve = answer.curve
    assert curve is not None
    totals = [sum(column) for column in zip(*curve.bytes_by_class, strict=True)]
    assert max(totals) == answer.reserved_bytes - answer.parts["fragmentation"]
    assert max(curve.reserved_bytes) == answer.reserved_bytes
    assert [name for name, _ in curve.phases] == ["forward", "backward", "optimizer"]


def test_the_job_carries_its_traced_peak(answer: TraceAnswer) -> None:
    assert answer.job is not None
    job = job_from_dict(answer.job)
    assert job.traced_peak_bytes == answer.reserved_bytes
    assert (job.family, job.batch_size, job.optimizer) == ("cnn", 16, "adam")


def test_the_answer_survives_json(answer: TraceAnswer) -> None:
    assert answer_from_dict(json.loads(json.dumps(answer_to_dict(answer)))) == answer


def test_precision_and_optimizer_move_the_answer() -> None:
    def requested(**options: object) -> int:
        return trace_model(network(), IMAGES, **options).requested_bytes

    assert requested(optimizer="sgd") < requested(optimizer="adam")
    assert requested(precision="bf16") < requested(precision="amp_bf16") <= requested(precision="fp32") + 8 * MIB


def test_attention_kernels_differ(example: Callable[[str], ModuleType]) -> None:
    model = example("gpt2").build(vocabulary=512, width=128, heads=2, depth=2)
    tokens = torch.empty(4, 1024, dtype=torch.long, device="meta")

    def requested(kernel: str | None) -> int:
        return trace_model(model, tokens, attention_kernel=kernel).requested_bytes

    # fp32 runs the memory-efficient kernel, which keeps no matrix of queries by keys
    assert requested(None) == requested("memory_efficient")
    assert requested("math") > requested(None) + 2 * (4 * 2 * 1024 * 1024 * 4)


def test_expandable_segments_waste_less(example: Callable[[str], ModuleType]) -> None:
    model = example("resnet50").build()
    images = torch.empty(4, 3, 128, 128, device="meta")
    plain = trace_model(model, images)
    grown = trace_model(model, images, allocator=AllocatorSettings(expandable_segments=True))
    assert grown.allocated_bytes <= plain.allocated_bytes
    assert grown.parts["fragmentation"] < plain.parts["fragmentation"]


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("precision", "fp8", InvalidJobError),
        ("optimizer", "lion", InvalidJobError),
        ("gpu", "Voodoo 2", InvalidRequestError),
        ("zero_grad", "never", InvalidRequestError),
        ("loss", "hinge", InvalidRequestError),
        ("batch_size", 0, InvalidJobError),
    ],
)
def test_values_that_do_not_exist(option: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=option):
        trace_model(network(), IMAGES, **{option: value})
