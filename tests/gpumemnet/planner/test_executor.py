"""A model under a plan computes the same to the last bit, and the memory that the plan frees is
free."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn

from gpumemnet.planner import Decision, applied
from tests.gpumemnet.planner.networks import NETWORKS, Network

EVERY = tuple(Decision)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decisions_of(network: Network, name: str) -> dict[str, Decision]:
    """The same decision for all units, or with ``mixed`` every decision in turn."""
    turns = cycle(EVERY[1:] + EVERY[:1]) if name == "mixed" else cycle([Decision(name)])
    return dict(zip(network.units, turns, strict=False))


def trained(
    network: Network, plan: Mapping[str, Decision] | None, autocast: bool = False, steps: int = 2
) -> list[Tensor]:
    """Losses, parameters, gradients, buffers and optimizer state after some steps."""
    torch.manual_seed(0)
    model = network.build()
    batches = [network.batch() for _ in range(steps)]
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    handle = applied(model, plan) if plan is not None else None
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if handle is not None:
        handle.undo()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*losses, *model.state_dict().values(), *gradients, *state]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    network = NETWORKS[name]
    plain = trained(network, None)
    for decision in (*EVERY[1:], "mixed"):
        assert_same(trained(network, decisions_of(network, decision)), plain)


@pytest.mark.parametrize("decision", ["mixed", "swap"])
@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_training_with_autocast_is_the_same(name: str, decision: str) -> None:
    network = NETWORKS[name]
    assert_same(
        trained(network, decisions_of(network, decision), autocast=True),
        trained(network, None, autocast=True),
    )


def gradients(model: nn.Module, batch: Tensor, *, backward_passes: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(batch).square().mean()
    for turn in range(backward_passes):
        loss.backward(retain_graph=turn < backward_passes - 1)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.fixture
def gpt() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return NETWORKS["gpt"].build(), NETWORKS["gpt"].batch()


THREE = {"blocks.0": "swap", "blocks.1": "recompute_and_swap_input", "blocks.2": "recompute"}


def test_a_graph_that_is_kept_runs_backward_again(gpt: tuple[nn.Module, Tensor]) -> None:
    model, batch = gpt
    plain = gradients(model, batch, backward_passes=2)
    with applied(model, THREE):
        assert_same(gradients(model, batch, backward_passes=2), plain)


def test_microbatches_may_be_interleaved(gpt: tuple[nn.Module, Tensor]) -> None:
    model, batch = gpt

    def both() -> list[Tensor]:
        torch.manual_seed(1)
        first, second = model(batch[:2]).square().mean(), model(batch[2:]).square().mean()
        first.backward()
        second.backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    plain = both()
    with applied(model, THREE):
        assert_same(both(), plain)


def test_host_memory_is_used_again_in_the_next_step(gpt: tuple[nn.Module, Tensor]) -> None:
    model, batch = gpt
    with applied(model, THREE) as plan:
        gradients(model, batch)
        after_first = plan.host_bytes
        gradients(model, batch)
        assert plan.host_bytes == after_first > 0


def test_undo_leaves_no_trace(gpt: tuple[nn.Module, Tensor]) -> None:
    model, _ = gpt
    names, state = [name for name, _ in model.named_modules()], list(model.state_dict())
    before = [set(vars(module)) for module in model.modules()]
    plan = applied(model, THREE)
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == state
    plan.undo()
    plan.undo()
    assert [set(vars(module)) for module in model.modules()] == before


def test_copies_and_pickles_of_a_planned_model_work_on_their_own(
    gpt: tuple[nn.Module, Tensor],
) -> None:
    model, batch = gpt
    plain = gradients(model, batch)
    with applied(model, THREE):
        # torch.save pickles a whole model, and the "spawn" method of multiprocessing sends it to a
        # child process as a pickle.
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies:
        assert_same(gradients(each, batch), plain)
        assert all(parameter.grad is None for parameter in model.parameters())


class Failing(nn.Module):
    """Fails in the middle of its forward pass when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.must_fail = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).tanh())
        if self.must_fail:
            raise ValueError("told to fail")
        out: Tensor = self.second(x)
        return out


@pytest.mark.parametrize("decision", EVERY)
def test_a_forward_pass_that_fails_leaves_the_model_usable(decision: Decision) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Failing(), Failing())
    batch = torch.randn(512, 64)
    plain = gradients(model, batch)
    with applied(model, {"0": decision, "1": decision}):
        model[1].must_fail = True  # type: ignore[assignment]
        with pytest.raises(ValueError, match="told to fail"):
            gradients(model, batch)
        model[1].must_fail = False  # type: ignore[assignment]
        assert_same(gradients(model, batch), plain)
        packed = torch.ones(2, requires_grad=True).exp()
        assert torch.equal(packed.grad_fn._saved_result, packed)  # type: ignore[union-attr]  # no hook was left behind


def swapped_bytes(module: nn.Module, batch: Tensor, autocast: bool = False) -> int:
    with applied(nn.ModuleDict({"unit": module}), {"unit": "swap"}) as plan:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module(batch).float().sum()
        loss.backward()
        return plan.host_bytes


def test_tensors_that_share_memory_are_copied_once_and_weights_never() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(256, 256, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.weight(x).chunk(2, dim=-1)
            out: Tensor = first.mul(second).mul(first)
            return out

    batch = torch.randn(
        128, 256
    )  # 128 KiB, as is what the linear layer returns; a product of two halves has 64 KiB
    assert swapped_bytes(Shared(), batch) == 2 * 128 * 1024 + 64 * 1024
    assert swapped_bytes(nn.Linear(256, 256), batch) == 128 * 1024
    assert (
        swapped_bytes(nn.Linear(256, 256), batch, autocast=True) == 64 * 1024
    )  # without the weight in bfloat16
    assert swapped_bytes(nn.Linear(256, 256), batch[:32].clone()) == 0  # too little


def test_a_tensor_that_changes_between_two_saves_is_copied_twice() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            unused = x.sin()
            x.add_(1)
            return x.cos() + 0 * unused.detach()

    unit, batch = nn.ModuleDict({"unit": Changing()}), torch.ones(128, 256, requires_grad=True)
    unit["unit"](batch).sum().backward()
    plain, batch.grad = batch.grad, None
    with applied(unit, {"unit": "swap"}):
        unit["unit"](batch).sum().backward()
    assert plain is not None
    assert batch.grad is not None
    assert torch.equal(batch.grad, plain)


def test_a_weight_that_changes_before_the_backward_pass_is_noticed_as_without_a_plan() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with applied(model, {"0": "swap", "1": "swap"}):
        loss = model(torch.randn(512, 64, requires_grad=True)).sum()
        with torch.no_grad():
            next(model[1].parameters()).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
