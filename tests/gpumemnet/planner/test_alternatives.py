"""The alternatives to a plan: each one's memory is that of the same change to a trace."""

from functools import cache

import pytest
import torch
from torch import nn

import gpumemnet
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import find_profile, with_available
from gpumemnet.planner.alternatives import alternatives, microbatch_size
from gpumemnet.planner.chain import chain_of
from gpumemnet.planner.costs import find_machine
from gpumemnet.planner.plans import Alternative
from gpumemnet.planner.step_units import split_step
from gpumemnet.tracing.api import TraceOptions, checked_request
from gpumemnet.units import MIB

WIDTH, BATCH = 512, 48
FITS_SOME = 950 * MIB


class Block(nn.Module):
    """A residual block with a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.narrow(torch.relu(self.wide(x)))
        return x + hidden


@cache
def found(budget_bytes: int, precision: str = "fp32") -> dict[str, Alternative]:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(4)))
    inputs = inputs_from_example(torch.empty(BATCH, 64, WIDTH, device="meta"), None)
    device = with_available(find_profile("RTX-4090"), budget_bytes)
    request = checked_request(TraceOptions(precision=precision), device)
    step, machine = split_step(model, inputs, request), find_machine(device)
    costs = step, machine, chain_of(step, machine)
    return {each.name: each for each in alternatives(model, inputs, request, costs)}


def test_each_takes_what_a_trace_of_the_same_change_says() -> None:
    rows = found(FITS_SOME)
    assert [name for name in rows if name != "adamw_8bit"] == [  # needs bitsandbytes
        *("expandable_segments", "fused_optimizer", "microbatches", "checkpointing"),
        *("every_second_block", "selective_checkpointing", "offload_activations"),
        *("amp_bf16", "paged_adamw_8bit", "fsdp_2", "bf16"),
    ]
    assert all((each.verdict == "yes") == (each.safe_bytes <= FITS_SOME) for each in rows.values())
    assert rows["microbatches"].verdict == "yes" != rows["fused_optimizer"].verdict
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(4)))
    half, whole = rows["every_second_block"], rows["checkpointing"]
    assert whole.expected_bytes < half.expected_bytes
    assert 0 < float(half.time.split()[0]) < float(whole.time.split()[0])
    for name in ("fused_optimizer", "amp_bf16", "microbatches", "checkpointing", "fsdp_2", "bf16"):
        each = rows[name]
        options = dict(each.trace_options)
        inputs = torch.empty(options.pop("batch_size", BATCH), 64, WIDTH, device="meta")
        device = with_available(find_profile("RTX-4090"), FITS_SOME)
        traced = gpumemnet.trace(model, inputs, gpu=device, **options)
        found_bytes = each.expected_bytes, each.safe_bytes
        near = 0.01 if name == "checkpointing" else 0  # from the recorded step, not from a new one
        assert found_bytes == pytest.approx((traced.expected_bytes, traced.safe_bytes), near), name
    assert "bf16" not in found(FITS_SOME, "bf16")
    micro = rows["microbatches"].trace_options
    assert micro["batch_size"] * micro["gradient_accumulation"] == BATCH


@pytest.mark.parametrize(
    ("batch_size", "largest", "size"),
    [(32, 31, 16), (32, 8, 8), (32, 11, 8), (31, 30, 16), (31, 10, 8), (7, 0, 1)],
)
def test_microbatches_are_of_one_size_where_that_costs_little(
    batch_size: int, largest: int, size: int
) -> None:
    assert microbatch_size(batch_size, largest) == size
