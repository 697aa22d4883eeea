"""The training steps themselves, run on the CPU: every option trains, in the order that the rows
speak of."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch

from dataset_builder.families import mlp
from dataset_builder.families.blocks import checkpoint_blocks
from dataset_builder.measure.training import (
    build_network,
    measure,
    note_statistics,
    train,
)
from dataset_builder.planned_job import Options, PlannedJob, can_run
from gpumemnet.job.training_job import OPTIMIZER_IMPLEMENTATIONS, OPTIMIZERS, PRECISIONS

CPU = torch.device("cpu")
ARCHITECTURE = mlp.MlpArchitecture(
    shape="residual",
    input_width=7,
    output_width=5,
    hidden_widths=(6, 6),
    activation="prelu",
    norm="batch_norm",
    dropout=0.1,
)


def planned(**options: object) -> PlannedJob:
    return PlannedJob("mlp", ARCHITECTURE, Options(**{"batch_size": 4, **options}))  # type: ignore[arg-type]


def test_a_network_without_blocks_is_not_called_checkpointed() -> None:
    with pytest.raises(RuntimeError, match="has no blocks to checkpoint"):
        checkpoint_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2)))


COMBINATIONS = [
    combination
    for combination in itertools.product(OPTIMIZERS, OPTIMIZER_IMPLEMENTATIONS)
    if can_run(
        Options(batch_size=1, optimizer=combination[0], optimizer_implementation=combination[1]),
        None,
    )
]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_optimizers_and_implementations_train_in_every_precision(precision: str) -> None:
    """Each precision takes another third of the combinations."""
    for optimizer, implementation in COMBINATIONS[PRECISIONS.index(precision) % 3 :: 3]:
        job = planned(
            optimizer=optimizer, optimizer_implementation=implementation, precision=precision
        )
        phases: list[str] = []

        def observe(name: str, phases: list[str] = phases) -> int:
            phases.append(name)
            return 0

        assert train(job, CPU, 0, observe) == 3
        assert phases == ["build", "forward", "backward", "step_1", "step_2", "step_3"]


@pytest.mark.parametrize(
    "options",
    [{"checkpointing": "every_block"}, {"gradient_accumulation": 3}, {"frozen_share": 0.6}],
)
def test_the_other_options_train(options: dict[str, object]) -> None:
    assert train(planned(**options), CPU, 0, lambda _: 0) == 3


@pytest.mark.parametrize(
    ("reserved", "steps"),
    [
        ([5, 5, 5], 3),
        ([1, 5, 5, 5], 4),
        ([1, 2, 3, 4, 4, 4], 6),
        (list(range(10)), 10),
        ([1, 2, 2, 3, 3, 3], 6),
    ],
)
def test_steps_go_on_until_reserved_bytes_stand_still(reserved: list[int], steps: int) -> None:
    readings = iter(reserved)
    assert (
        train(planned(), CPU, 0, lambda name: next(readings) if name.startswith("step") else 0)
        == steps
    )


def test_checkpointing_gives_the_same_gradients_and_recomputes() -> None:
    gradients = []
    for checkpointing in ("none", "every_block"):
        torch.manual_seed(0)
        network = build_network(
            PlannedJob("mlp", ARCHITECTURE, Options(batch_size=4, checkpointing=checkpointing)), CPU
        )
        for module in network.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        runs: list[int] = []
        next(
            module for module in network.modules() if isinstance(module, torch.nn.PReLU)
        ).register_forward_hook(lambda *_, runs=runs: runs.append(1))
        network(torch.ones(4, 7).cumsum(0)).sum().backward()
        gradients.append(
            torch.cat(
                [each.grad.flatten() for each in network.parameters() if each.grad is not None]
            )
        )
        assert len(runs) == (2 if checkpointing == "every_block" else 1)
    first, second = gradients
    assert torch.allclose(first, second)


def test_a_network_has_usable_initial_values() -> None:
    job = planned()
    torch.manual_seed(0)
    network = build_network(job, CPU)
    for name, buffer in network.named_buffers():
        assert float(buffer.float().mean()) == (1.0 if name.endswith("running_var") else 0.0)
    first = next(iter(network.parameters()))
    assert 0 < first.detach().abs().max().item() <= 7**-0.5


class Campaign:
    """The campaign's end of a connection: it answers every message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def recv(self) -> bool:
        return True


def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The only message of :func:`measure`, run here without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    campaign = Campaign()
    measure({"visible": "", "probe_bytes": [1]}, cast(Any, campaign))
    [result] = campaign.messages
    return result


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        ("CUDA error: out of memory", "oom"),
        ("CUDNN_STATUS_ALLOC_FAILED", "oom"),
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":1407',
            "oom",
        ),
        ("CUDA error: an illegal memory access was encountered", "error"),
    ],
)
def test_failures_that_mean_out_of_memory(
    failure: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError(failure)

    monkeypatch.setattr(torch.cuda, "init", fails)
    result = measured(monkeypatch)
    assert result["status"] == status
    assert result["reason"].startswith(failure[:30])


def test_without_a_gpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert measured(monkeypatch)["status"] == "error"


def test_the_peaks_of_all_phases_are_kept() -> None:
    noted: dict[str, int] = {}
    for peak, retries in ((5, 0), (9, 1), (2, 3)):
        note_statistics(
            {"requested_bytes.all.peak": peak, "num_alloc_retries": retries, "unknown": 1}, noted
        )
    assert noted == {"peak_requested_bytes": 9, "alloc_retries": 3}
