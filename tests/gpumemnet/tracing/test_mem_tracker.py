"""Where no GPU is at hand, PyTorch's own MemTracker is the peer: its allocated peak, byte for byte.

MemTracker sees what a CPU does, so CUDA's corrections are left out here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import peak_of
from gpumemnet.tracing.training_loop import record
from tests.nightly import nightly

BATCH = 4
STEP_SCALAR_BYTES = 4
"""AdamW's step count of each parameter, a tensor on the host in CUDA training too; MemTracker on a
fake CPU counts it."""


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout's mask has another type on a CPU than on CUDA, so the two could not agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch_of(name: str) -> Tensor:
    return (
        torch.zeros(BATCH, 1024, dtype=torch.long)
        if name == "gpt2"
        else torch.zeros(BATCH, 3, 224, 224)
    )


def mem_tracker_peak_bytes(build: Callable[[], nn.Module], name: str) -> int:
    with FakeTensorMode(), sdpa_kernel([SDPBackend.MATH]):
        model = without_dropout(build())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            batch = batch_of(name)
            targets = torch.zeros(BATCH * (1024 if name == "gpt2" else 1), dtype=torch.long)
            output = model(batch)
            loss = F.cross_entropy(output.flatten(0, -2), targets) / 1
            torch.autograd.backward(loss)
            optimizer.step()

        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return snapshot["Total"] - STEP_SCALAR_BYTES * len(list(model.parameters()))


@pytest.mark.parametrize("name", nightly(["gpt2", "resnet50", "vit"]))
def test_the_allocated_peak_is_that_of_mem_tracker(
    name: str, example: Callable[[str], ModuleType], platform: Platform
) -> None:
    build = example(name).build
    with torch.device("meta"):
        model = without_dropout(build())
    options = TraceOptions(
        optimizer="adamw", optimizer_implementation="for_loop", loss="cross_entropy"
    )
    inputs = inputs_from_example(batch_of(name), None)
    timeline = record(model, inputs, options, platform, corrected=False).timeline
    tensors = [
        0 if storage.memory_class == "workspace" else storage.size_bytes
        for storage in timeline.storages
    ]
    assert peak_of(timeline, tensors)[0] == mem_tracker_peak_bytes(build, name)
