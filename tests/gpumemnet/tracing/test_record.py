"""The recorder and its loop, on networks small enough to count by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import Timeline, live_at, peak_of
from gpumemnet.tracing.training_loop import record

FLOAT = 4


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4


def traced(model: nn.Module, inputs: object, platform: Platform, **options: Any) -> Timeline:
    return record(
        model, inputs_from_example(inputs, None), TraceOptions(**options), platform
    ).timeline


def bytes_by_class(timeline: Timeline, event: int) -> Counter[str]:
    held: Counter[str] = Counter()
    for index in live_at(timeline, event):
        held[timeline.storages[index].memory_class] += timeline.storages[index].size_bytes
    return held


def end_of_step(timeline: Timeline, step: int) -> int:
    return timeline.step_starts[step] - 1


def test_what_the_forward_pass_keeps(platform: Platform) -> None:
    timeline = traced(
        perceptron(), torch.zeros(2, 8), platform, optimizer="sgd", loss="cross_entropy"
    )
    backward = next(phase for phase in timeline.phases if phase.name == "backward")
    saved = [timeline.storages[i] for i in live_at(timeline, backward.start - 1)]
    kept = [(s.module, s.size_bytes) for s in saved if s.memory_class == "saved_activation"]
    # ReLU's output, which the second linear layer needs too; the first linear layer's own output
    # goes
    assert ("1", FLOAT * 2 * 16) in kept
    assert ("0", FLOAT * 2 * 16) not in kept
    assert (
        sum(s.size_bytes for s in saved if s.memory_class == "input") == FLOAT * 2 * 8 + 8 * 2
    )  # the targets are int64


def test_gradients_accumulate_and_belong_to_their_modules(platform: Platform) -> None:
    timeline = traced(
        perceptron(), torch.zeros(2, 8), platform, optimizer="sgd", gradient_accumulation=3
    )
    assert [phase.name for phase in timeline.phases if phase.step == 1] == [
        "forward",
        "backward",
    ] * 3 + ["optimizer"]
    held = live_at(timeline, end_of_step(timeline, 2))
    gradients = [
        timeline.storages[i] for i in held if timeline.storages[i].memory_class == "gradient"
    ]
    assert sorted((g.module, g.size_bytes) for g in gradients) == sorted(
        [("0", FLOAT * 8 * 16), ("0", FLOAT * 16), ("2", FLOAT * 16 * 4), ("2", FLOAT * 4)]
    )


def test_where_gradients_are_dropped_moves_the_peak(platform: Platform) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    def peak(zero_grad: str) -> int:
        timeline = traced(
            model, torch.zeros(2048, 512), platform, optimizer="sgd", zero_grad=zero_grad
        )
        return peak_of(
            timeline,
            [0 if s.memory_class == "workspace" else s.size_bytes for s in timeline.storages],
        )[0]

    assert peak("before_forward") == peak("after_step") <= peak("before_backward")


def test_a_frozen_layer_has_neither_gradient_nor_state(platform: Platform) -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    timeline = traced(model, torch.zeros(2, 8), platform, optimizer="adamw")
    held = bytes_by_class(timeline, end_of_step(timeline, 2))
    assert held["gradient"] == FLOAT * (16 * 4 + 4)
    assert held["optimizer_state"] == 2 * FLOAT * (16 * 4 + 4)


def test_tied_weights_are_there_once(platform: Platform) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 8)
            self.head = nn.Linear(8, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.embedding(tokens))
            return out

    timeline = traced(Tied(), torch.zeros(2, 4, dtype=torch.long), platform, optimizer="sgd")
    held = bytes_by_class(timeline, end_of_step(timeline, 2))
    assert held["parameter"] == held["gradient"] == FLOAT * 64 * 8


@pytest.mark.parametrize(("length", "last"), [(20_000, 19_999), (10_000_000, 1)])
def test_tables_of_whole_numbers_keep_values_that_models_read(
    platform: Platform, length: int, last: int
) -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.table[-1].item() == last  # type: ignore[index]
            output: Tensor = super().forward(x)
            return output

    model = Reads(8, 4)
    model.register_buffer("table", torch.arange(length))
    timeline = traced(model, torch.zeros(2, 8), platform)
    assert bytes_by_class(timeline, 10)["buffer"] == 8 * length


class Forward(nn.Linear):
    """A layer before which something else is computed."""

    def __init__(self, before: Callable[[], object]) -> None:
        super().__init__(8, 4)
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        output: Tensor = super().forward(x)
        return output


def positions() -> Tensor:
    return torch.arange(5).view(1, 1, 1, 5).transpose(-1, -2)


@pytest.mark.parametrize(
    "before",
    [
        lambda: bool((positions() > 2).any()),
        lambda: (1 - positions()).sum().item(),
        lambda: (positions() == 0).nonzero(),
        lambda: float(
            nn.functional.group_norm(
                torch.ones(1, 8, 6, 6).to(memory_format=torch.channels_last), 2
            ).sum()
        ),
    ],
)
def test_real_tensors_keep_their_values_whatever_their_layout(
    platform: Platform, before: Callable[[], object]
) -> None:
    assert traced(Forward(before), torch.zeros(2, 8), platform).storages


def test_softmax_of_nested_tensors_is_left_to_them(platform: Platform) -> None:
    class Nested(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            offsets = torch.tensor([0, 5, 10])
            rows = torch.nested.nested_tensor_from_jagged(
                super().forward(x), offsets, min_seqlen=5, max_seqlen=5
            )
            return torch.softmax(rows, -1).values()

    assert traced(Nested(8, 4), torch.zeros(10, 8), platform).storages


def test_the_model_is_left_as_it_was(platform: Platform) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 2)
    ).eval()
    before = {
        name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    hooks = len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)
    record(model, inputs_from_example(torch.zeros(2, 3, 8, 8), None), TraceOptions(), platform)
    assert not any(module.training for module in model.modules())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        identity, value = before[name]
        assert id(tensor) == identity
        assert torch.equal(tensor, value)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert hooks == (
        len(module_hooks._global_forward_hooks),
        len(module_hooks._global_forward_pre_hooks),
    )
    torch.nn.functional.dropout(
        torch.empty(2, device="meta"), 0.5, True
    )  # PyTorch's own kernels are back


def test_an_optimizer_of_the_users_own(platform: Platform) -> None:
    model = perceptron()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "momentum": 0.9},
    ]
    own = torch.optim.SGD(groups, lr=0.01)
    timeline = traced(model, torch.zeros(2, 8), platform, own_optimizer=own)
    assert bytes_by_class(timeline, end_of_step(timeline, 2))["optimizer_state"] == FLOAT * (
        16 * 4 + 4
    )
    by_factory = traced(
        model,
        torch.zeros(2, 8),
        platform,
        own_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    assert (
        bytes_by_class(by_factory, end_of_step(by_factory, 2))["optimizer_state"]
        == FLOAT * PARAMETERS
    )
    with pytest.raises(InvalidRequestError, match="not the model's"):
        traced(perceptron(), torch.zeros(2, 8), platform, own_optimizer=own)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda output: output, "must be a scalar, not a tensor of shape 2x4"),
        (lambda output: output.detach().sum(), "does not depend on any parameter"),
        (lambda output: 3.0, "test_record.py line .* must be a tensor, not 3.0"),
        (lambda output: output.sum().item(), "test_record.py line .* must be a tensor, not 1.0"),
    ],
)
def test_a_loss_that_is_none(
    loss: Callable[[Tensor], object], sentence: str, platform: Platform
) -> None:
    with pytest.raises(ExtractError, match=sentence):
        traced(perceptron(), torch.zeros(2, 8), platform, loss=loss)


def test_a_model_that_cannot_be_traced_is_named_with_its_line(platform: Platform) -> None:
    class Reshapes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(3, -1)

    with pytest.raises(ExtractError, match=r"test_record\.py line \d+, in forward: RuntimeError"):
        traced(Reshapes(4096, 4096), torch.zeros(2, 4096), platform)


def test_nothing_to_train(platform: Platform) -> None:
    with pytest.raises(ExtractError, match="nothing would be trained"):
        traced(perceptron().requires_grad_(False), torch.zeros(2, 8), platform)


def test_targets_of_language_models_and_segmentation(platform: Platform) -> None:
    language = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100))
    timeline = traced(language, torch.zeros(2, 16, dtype=torch.long), platform, optimizer="sgd")
    assert (
        sum(s.size_bytes for s in timeline.storages if s.memory_class == "input")
        == 2 * 2 * 8 * 2 * 16
    )  # 2 steps, 2 tensors
    images = traced(nn.Conv2d(3, 5, 1), torch.zeros(2, 3, 8, 8), platform, optimizer="sgd")
    inputs = [s.size_bytes for s in images.storages if s.memory_class == "input"]
    assert sorted(inputs) == sorted(2 * [FLOAT * 2 * 3 * 8 * 8, 8 * 2 * 8 * 8])


# Order: what PyTorch's CUDA code was seen to do, allocation by allocation, see
# tests/dataset_builder/measure/null_gpu.


def allocations(timeline: Timeline, operator: str) -> list[int]:
    """Bytes of everything that ``operator`` takes, in order."""
    taken = [timeline.storages[event] for event in timeline.events if event >= 0]
    return [storage.size_bytes for storage in taken if storage.operator == operator]


def test_targets_come_with_the_batch_and_stay(platform: Platform) -> None:
    timeline = traced(perceptron(), torch.zeros(2, 8), platform, loss="cross_entropy")
    for start, end in pairwise(timeline.step_starts):
        arrived = [
            timeline.storages[event].size_bytes
            for event in timeline.events[start:end]
            if event >= 0
        ][:2]
        assert arrived == [2 * 8 * FLOAT, 2 * 8]  # two samples, two classes of eight bytes


def test_autocast_casts_the_last_argument_first(platform: Platform) -> None:
    timeline = traced(
        nn.Linear(8, 16), torch.zeros(2, 8), platform, precision="amp_bf16", loss="cross_entropy"
    )
    assert allocations(timeline, "aten._to_copy")[:3] == [
        16 * 2,
        8 * 16 * 2,
        2 * 8 * 2,
    ]  # bias, weight, input


def test_autocast_casts_small_tensors_that_have_values_too(platform: Platform) -> None:
    class Positioned(nn.Conv1d):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given) + super().forward(
                torch.zeros(1, 8, 1) + torch.arange(4.0)
            )

    timeline = traced(Positioned(8, 16, 1), torch.zeros(2, 8, 4), platform, precision="amp_bf16")
    assert 2 * 8 * 4 * 2 in allocations(timeline, "aten._to_copy")  # the images


def test_dropout_makes_its_mask_first(platform: Platform) -> None:
    timeline = traced(
        nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)),
        torch.zeros(2, 8),
        platform,
        loss="cross_entropy",
    )
    assert allocations(timeline, "aten.native_dropout")[:2] == [2 * 16, 2 * 16 * FLOAT]


def test_the_workspace_of_cublas_comes_after_the_first_product(platform: Platform) -> None:
    timeline = traced(nn.Linear(8, 16), torch.zeros(2, 8), platform, loss="cross_entropy")
    assert allocations(timeline, "aten.addmm")[:2] == [
        2 * 16 * FLOAT,
        platform.device.blas_workspace_bytes,
    ]


def test_the_gradient_of_mish_is_one_tensor(platform: Platform) -> None:
    timeline = traced(
        nn.Sequential(nn.Linear(8, 16), nn.Mish()),
        torch.zeros(2, 8),
        platform,
        loss="cross_entropy",
    )
    operators = {storage.operator for storage in timeline.storages}
    assert not operators & {"aten.softplus", "aten.tanh", "aten.sigmoid"}


def test_the_math_kernel_makes_its_causal_mask_on_the_gpu(platform: Platform) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.projection(x)
            return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)

    timeline = traced(
        Causal(), torch.zeros(2, 3, 32, 4), replace(platform, attention_kernel="math"), loss="mean"
    )
    assert (
        allocations(timeline, "aten.new_ones")[0]
        == allocations(timeline, "aten.tril")[0]
        == 32 * 32
    )
    assert allocations(timeline, "aten.where")[0] == 32 * 32 * FLOAT


def test_positions_of_a_large_batch_can_be_looked_into(platform: Platform) -> None:
    class LookingForPackedSequences(nn.Module):
        """As transformers does before it makes a mask: one pass over the positions of every token
        of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)
            self.packed = False

        def forward(self, tokens: Tensor) -> Tensor:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(
                tokens.shape[0], -1
            )
            steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
            self.packed = not bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())
            hidden: Tensor = self.embedding(tokens)
            return hidden

    model = LookingForPackedSequences()
    traced(model, torch.zeros(64, 1024, dtype=torch.long), platform, loss="mean")
    assert not model.packed
