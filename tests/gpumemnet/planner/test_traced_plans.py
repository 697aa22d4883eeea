"""A trace of a model with a plan applied takes what PyTorch's own CUDA code takes, whose allocator
ran on a device that computes nothing (``tests/dataset_builder/measure/null_gpu``, torch 2.13,
H200)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import gpumemnet
from benchmarks.cuda_code import peaks_of
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import device_profile
from gpumemnet.planner import Decision, applied
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from tests.gpumemnet.planner.networks import NETWORKS
from tests.nightly import nightly

ON_CUDA: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "gpt": {
        "keep": (117080576, 134217728),
        "recompute": (89142784, 100663296),
        "swap": (97550848, 102760448),
        "recompute_and_swap_input": (87152128, 98566144),
        "recompute_cheap": (103298560, 125829120),
    },
    "resnet": {
        "keep": (103655424, 111149056),
        "recompute": (88179200, 90177536),
        "swap": (92385280, 111149056),
        "recompute_and_swap_input": (86089216, 90177536),
        "recompute_cheap": (98664960, 111149056),
    },
}
"""Network and decision → peaks of allocated and of reserved bytes; convolutions without
workspaces."""
SHAPES = {"gpt": (64, 128), "resnet": (128, 3, 32, 32)}
OPTIONS = TraceOptions(optimizer="adamw", precision="amp_bf16", keeps_names=False)
SEGMENT_BYTES = 2 * 2**20


@pytest.mark.parametrize(
    "decision",
    ["swap", "recompute_cheap", *nightly(["keep", "recompute", "recompute_and_swap_input"])],
)
@pytest.mark.parametrize("name", ON_CUDA)
def test_a_traced_plan_takes_what_cuda_code_takes(name: str, decision: str) -> None:
    network = NETWORKS[name]
    plan = dict.fromkeys(network.units, Decision(decision))
    batch = (
        torch.zeros(SHAPES[name], dtype=torch.long)
        if network.takes_tokens
        else torch.empty(SHAPES[name], device="meta")
    )
    model = network.build()
    with applied(model, plan):
        peaks = peaks_of(
            model,
            inputs_from_example(batch, None),
            OPTIONS,
            Platform.of(device_profile("H200"), OPTIONS),
        )
    assert peaks[1] == ON_CUDA[name][decision][0]
    assert abs(peaks[2] - ON_CUDA[name][decision][1]) <= SEGMENT_BYTES


@pytest.mark.parametrize("decision", list(Decision)[1:])
def test_constants_whose_values_a_trace_knows_are_recomputed_and_swapped(
    decision: Decision,
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            buckets = (positions - torch.arange(len(x), device=x.device)).clamp(0, 3)
            return torch.tanh(self.linear(x)) * positions[:, None] * buckets[:, None]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(len(x), device=x.device)  # 64 KiB, which are swapped
            for block in self.blocks:
                x = block(x, positions)
            return x

    with applied(model := Model(), {f"blocks.{number}": decision for number in range(2)}):
        gpumemnet.trace(model, torch.empty(2**13, 4), gpu="A100")
