"""``gpumemnet.trace(model, inputs)``: the answer, its parts, and what else can be asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import gpumemnet
from gpumemnet.cli.trace import show_trace
from gpumemnet.errors import InvalidJobError, InvalidRequestError
from gpumemnet.gpu import VERDICT_TEXTS, available_mib, device_profile
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.tracing import ExtraResults, TraceAnswer, trace
from gpumemnet.tracing.result import answer_from_dict, answer_to_dict
from gpumemnet.units import MIB


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 30 * 30, 10),
    )


IMAGES = torch.empty(16, 3, 32, 32, device="meta")


@pytest.fixture(scope="module")
def answer() -> TraceAnswer:
    everything = ExtraResults(batches=(1, 8, 64), max_batch=True, curve=True, job=True)
    return trace(network(), IMAGES, optimizer="adam", gpu="A100", extras=everything)


def test_it_reads_in_one_line(answer: TraceAnswer) -> None:
    text = repr(answer)
    assert text.startswith("<TraceAnswer: Sequential, batch size 16: expected 0.")
    assert text.endswith(f"GiB on {answer.gpu}>")
    assert len(text) < 120


@pytest.mark.parametrize(
    ("expected_mib", "safe_mib", "text"),
    [(39_000, 40_448, "fits"), (40_448, 40_449, "may not fit"), (40_449, 50_000, "does not fit")],
)
def test_one_verdict_with_three_outcomes_everywhere(
    answer: TraceAnswer, expected_mib: int, safe_mib: int, text: str
) -> None:
    other = replace(answer, expected_bytes=expected_mib * MIB, safe_bytes=safe_mib * MIB)
    report = StringIO()
    show_trace(other, (), Console(file=report, width=130))
    assert report.getvalue().lower().startswith(f"{text} {answer.gpu.lower()}: ")
    assert VERDICT_TEXTS[answer_to_dict(other)["verdict"]] == text
    assert other.fits == (text == "fits")


def test_importing_it_loads_no_torch() -> None:
    program = "import sys, gpumemnet; gpumemnet.trace; sys.exit('torch' in sys.modules)"
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
    assert [size for _, size in answer.peak.modules] == sorted(
        (size for _, size in answer.peak.modules), reverse=True
    )
    assert {name for name, _ in answer.peak.modules} <= {"", "0", "1", "2", "3", "4"}


def test_batches_and_the_largest_that_fits(answer: TraceAnswer) -> None:
    expected = [point.expected_bytes for point in answer.batches]
    assert [point.batch_size for point in answer.batches] == [1, 8, 64]
    assert expected == sorted(expected)
    assert answer.max_batch_size is not None
    fits = trace(network(), IMAGES, optimizer="adam", gpu="A100", batch_size=answer.max_batch_size)
    beyond = trace(
        network(), IMAGES, optimizer="adam", gpu="A100", batch_size=answer.max_batch_size + 1
    )
    assert fits.safe_bytes <= answer.available_bytes < beyond.safe_bytes
    assert fits.verdict == "yes" != beyond.verdict


def test_the_job_carries_its_traced_peak(answer: TraceAnswer) -> None:
    assert answer.job is not None
    job = job_from_dict(answer.job)
    assert job.traced_peak_bytes == answer.reserved_bytes
    assert (job.family, job.batch_size, job.optimizer) == ("cnn", 16, "adam")


def test_the_answer_survives_json(answer: TraceAnswer) -> None:
    assert answer_from_dict(json.loads(json.dumps(answer_to_dict(answer)))) == answer


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
    given: dict[str, Any] = {option: value}
    with pytest.raises(error, match=option):
        trace(network(), IMAGES, **given)


def images(width: int, layers: int) -> nn.Sequential:
    """A convolutional network whose activations shrink, so that cached segments do not fit later
    requests."""
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(layers):
        blocks += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def test_a_search_for_algorithms_counts_for_the_start_up_only() -> None:
    plain, searched = (
        trace(
            images(64, 3),
            torch.empty(32, 3, 64, 64, device="meta"),
            cudnn_benchmark=searches,
            gpu="A100",
        )
        for searches in (False, True)
    )
    assert plain.startup_peak_bytes == plain.expected_bytes
    assert searched.startup_peak_bytes is None  # only cuDNN knows what its search tries
    assert searched.expected_bytes < 1.1 * plain.expected_bytes
    assert sum(searched.parts.values()) == searched.expected_bytes <= searched.safe_bytes


def test_near_the_capacity_the_allocator_gives_cached_segments_back() -> None:
    card = device_profile("A100")
    reserve_bytes = (card.capacity_bytes // MIB - available_mib(card)) * MIB

    def on(capacity_bytes: int) -> TraceAnswer:
        batch = torch.empty(512, 3, 86, 86, device="meta")
        gpu = replace(card, capacity_bytes=capacity_bytes)
        return trace(images(64, 3), batch, gpu=gpu, keeps_names=False)

    roomy = on(card.capacity_bytes)
    spare_bytes = (roomy.reserved_bytes + roomy.context_bytes - roomy.smallest_bytes) // 4
    assert spare_bytes > 64 * MIB
    usable_bytes = roomy.smallest_bytes + spare_bytes
    tight = on(usable_bytes + reserve_bytes)
    assert roomy.smallest_bytes <= tight.expected_bytes <= usable_bytes < roomy.expected_bytes
    assert sum(tight.parts.values()) == tight.expected_bytes
    least_bytes = roomy.smallest_bytes + spare_bytes // 16  # without workspaces
    assert on(least_bytes + reserve_bytes).expected_bytes <= least_bytes
    too_small = on(roomy.smallest_bytes // 2)
    assert not too_small.fits
    assert (
        too_small.expected_bytes == roomy.expected_bytes
    )  # what it would take on a GPU that is large enough


class Masked(nn.Module):
    """Attention that leaves a mask out where nothing is padded, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.output = nn.Linear(64, 100)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).view(*tokens.shape, 4, 16).transpose(1, 2)
        mask = (
            None
            if attention_mask.all()
            else attention_mask.bool()[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        )
        hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
        return torch.as_tensor(self.output(hidden.transpose(1, 2).flatten(2)))


def test_masks_keep_their_values() -> None:
    tokens, whole = torch.randint(100, (4, 64)), torch.ones(4, 64, dtype=torch.long)
    padded = whole.clone()
    padded[1, 40:] = 0
    batches = ExtraResults(batches=(8,))
    without, with_mask = (
        trace(
            Masked(),
            {"tokens": tokens, "attention_mask": mask},
            precision="amp_bf16",
            gpu="A100",
            extras=batches,
        )
        for mask in (whole, padded)
    )
    assert without.requested_bytes < with_mask.requested_bytes
    assert without.batches[0].expected_bytes <= with_mask.batches[0].expected_bytes
    assert without.notes == with_mask.notes
    assert len(without.notes) == 1  # what lives until the next step


WIDE = nn.Linear(1024, 1024, bias=False)
WIDE_BYTES = 4 * 1024 * 1024


def wide(**options: Any) -> TraceAnswer:
    return trace(WIDE, torch.empty(64, 1024), loss="mean", **options)


def test_weight_decay_copies_the_gradients_and_nesterov_those_of_a_loop() -> None:
    def allocated(**settings: Any) -> int:
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, **settings)
        return wide(optimizer=sgd).allocated_bytes

    plain = wide(optimizer="sgd_momentum").allocated_bytes
    copied = WIDE_BYTES - (
        4 * 64 * 1024 + 512
    )  # otherwise the peak is in the backward pass, beside the output's gradient
    assert allocated(weight_decay=0.1, foreach=True) - plain == copied
    assert allocated(nesterov=True, foreach=True) == plain  # the foreach step adds in place
    assert allocated(nesterov=True, foreach=False) - plain == copied


def test_clipped_gradients_are_scaled_in_place() -> None:
    assert wide(optimizer="sgd").peak.phase != "optimizer"
    clipped, plain = wide(optimizer="sgd", clip_norm=1.0), wide(optimizer="sgd")
    assert 0 <= clipped.allocated_bytes - plain.allocated_bytes < 4096  # a few numbers


def test_the_context_is_what_it_is_said_to_be() -> None:
    answer = wide(context_mib=1000)
    assert (answer.context_bytes, answer.context_source) == (
        1000 * MIB,
        "measured: 1,000 MiB, by context_mib",
    )
    assert (
        answer.expected_bytes - answer.context_bytes == wide().expected_bytes - wide().context_bytes
    )


def test_names_and_a_smaller_last_batch() -> None:
    def kept(**options: Any) -> int:
        return trace(
            nn.Linear(4096, 8), torch.empty(4096, 4096), loss="mean", optimizer="sgd", **options
        ).allocated_bytes

    assert (
        kept() - kept(keeps_names=False) > 60 * MIB
    )  # a batch of 64 MiB lives until the next one is there
    assert wide(last_batch_size=7).reserved_bytes >= wide().reserved_bytes


def test_tf32_decides_which_convolutions_run() -> None:
    images = torch.empty(32, 64, 56, 56, device="meta")
    model = nn.Conv2d(64, 64, 3, padding=1)
    with_tf32, without = (
        trace(model, images, loss="mean", gpu="A100", tf32=tf32) for tf32 in (True, False)
    )
    assert (
        with_tf32.parts["workspace"] != without.parts["workspace"]
        or with_tf32.safe_bytes != without.safe_bytes
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"last_batch_size": 0}, "last_batch_size: must be between 1 and "),
        ({"context_mib": -5}, "context_mib: must be between 0 and 16384, not -5"),
    ],
)
def test_options_of_the_loop_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidJobError, match=re.escape(sentence)):
        wide(**options)


def test_a_model_is_built_without_its_weights() -> None:
    with gpumemnet.large_tensors_on_meta():
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.Linear(8, 8))
    assert [parameter.is_meta for parameter in model.parameters()] == [True, True, False, False]
