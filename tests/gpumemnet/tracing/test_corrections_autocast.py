from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpumemnet.physics.element_types import (
    BANNED,
    FLOAT32,
    FLOAT32_APPENDED,
    FLOAT32_RESULT,
    LOWER_PRECISION,
    PROMOTE,
)
from gpumemnet.tracing.operators import autocast
from tests.gpumemnet.tracing.corrected import Operators, corrected, meta, saved

HALF = torch.float16


def test_every_operator_that_pytorch_registers_is_in_a_list() -> None:
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    ours = {*LOWER_PRECISION, *FLOAT32, *FLOAT32_RESULT, *FLOAT32_APPENDED, *PROMOTE, *BANNED}
    # a build with CUDA has the recurrent layers of cuDNN too, which recurrent.py casts
    assert registered - {"_cudnn_rnn"} == ours
    assert len(autocast.autocast_overrides()) == len(ours)


def attention(*shape: int) -> Tensor:
    return F.scaled_dot_product_attention(meta(*shape), meta(*shape), meta(*shape))


@pytest.fixture
def region() -> Iterator[None]:
    with corrected(), torch.autocast("cuda"):
        yield


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_linear_layer_saves_casts(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 5, device="meta")

    def run() -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            output: Tensor = layer(meta(3, 4))
        return output

    name = str(dtype).removeprefix("torch.")
    # addmm in derivatives.yaml: mat1, mat2
    assert saved(run) == {f"{name}[3, 4]": 1, f"{name}[4, 5]": 1}
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_casts_of_a_pass_without_gradients_carry_them_in_a_later_one(context: Any) -> None:
    layer = nn.Linear(4, 5, device="meta")
    with context():
        layer(meta(3, 4))  # such as for labels that it guesses
    layer(meta(3, 4)).float().sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda: meta(2, 3) @ meta(3, 4), HALF),
        (lambda: F.prelu(meta(2, 3), meta(1)), HALF),
        (lambda: F.layer_norm(meta(2, 3, dtype=HALF), (3,)), torch.float32),
        (lambda: F.mse_loss(meta(2, 3, dtype=HALF), meta(2, 3)), torch.float32),
        (lambda: F.softmax(meta(2, 3, dtype=HALF), -1), torch.float32),
        (lambda: F.softmax(meta(2, 3, dtype=HALF), -1, dtype=HALF), HALF),
        (lambda: F.softmax(meta(2, 3, dtype=torch.float64), -1), torch.float64),
        (lambda: meta(2, 3, dtype=HALF).sum(dtype=HALF), HALF),
        (lambda: meta(2, 3, dtype=HALF).sum(1), torch.float32),
        (lambda: torch.norm(meta(2, 3, dtype=HALF)), torch.float32),
        (lambda: meta(2, 3, dtype=HALF).norm(dim=1), torch.float32),
        (lambda: F.pairwise_distance(meta(2, 3, dtype=HALF), meta(2, 3)), torch.float32),
        (
            lambda: torch.addcmul(meta(2, 3), meta(2, 3, dtype=HALF), meta(2, 3, dtype=HALF)),
            torch.float32,
        ),
        (lambda: torch.dot(meta(3, dtype=HALF), meta(3, dtype=HALF)), HALF),
        (
            lambda: F.grid_sample(
                meta(1, 1, 4, 4, dtype=HALF), meta(1, 2, 2, 2), align_corners=False
            ),
            torch.float32,
        ),
        (lambda: F.relu(meta(2, 3, dtype=HALF)), HALF),
        (lambda: meta(2, 3, dtype=HALF) + meta(2, 3), torch.float32),
        (lambda: meta(2, 3, dtype=torch.float64) @ meta(3, 4, dtype=torch.float64), torch.float64),
    ],
)
def test_result_types(run: Callable[[], Tensor], dtype: torch.dtype) -> None:
    assert run().dtype == dtype


@pytest.mark.usefixtures("region")
def test_types_that_do_not_mix_raise() -> None:
    with pytest.raises(
        RuntimeError, match=r"autocast to torch.float16 cannot promote torch.bfloat16"
    ):
        torch.dot(meta(3, dtype=torch.bfloat16), meta(3, dtype=HALF))


@pytest.mark.usefixtures("region")
def test_binary_cross_entropy_is_banned() -> None:
    with pytest.raises(RuntimeError, match="binary_cross_entropy is unsafe under autocast"):
        F.binary_cross_entropy(meta(3), meta(3))


def test_attention_is_chosen_by_the_type_that_autocast_gives() -> None:
    def run() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return attention(2, 3, 40, 16)

    assert saved(run)["bfloat16[2, 3, 40, 16]"] == 4


def test_cross_entropy_keeps_half_and_float_log_probabilities() -> None:
    def run() -> Tensor:
        with torch.autocast("cuda"):
            return F.cross_entropy(
                meta(4, 5) @ meta(5, 10), torch.zeros(4, dtype=torch.long, device="meta")
            )

    found = saved(run)
    # cross_entropy_loss asks log_softmax for its input's own type; nll_loss is in the float32 list
    assert (found["float16[4, 10]"], found["float32[4, 10]"]) == (1, 1)


def casts(run: Callable[[], object], *, cache_enabled: bool = True) -> int:
    with corrected(), Operators() as mode, torch.autocast("cuda", cache_enabled=cache_enabled):
        run()
    return int(mode.counts["_to_copy"])


def test_the_casts_of_weights_are_kept_until_the_region_ends() -> None:
    weight, x = nn.Parameter(meta(4, 4)), meta(4, 4, dtype=HALF)
    with corrected(), Operators() as mode:
        for _ in range(2):
            with torch.autocast("cuda"):
                for _ in range(3):
                    x @ weight
                with torch.autocast("cuda"):
                    x @ weight
                x @ weight
    assert mode.counts["_to_copy"] == 2


def test_what_is_no_leaf_or_needs_no_gradient_is_cast_each_time() -> None:
    weight, frozen, x = meta(4, 4), meta(4, 4, requires_grad=False), meta(4, 4, dtype=HALF)
    assert casts(lambda: (x @ weight, x @ weight)) == 1
    assert casts(lambda: (x @ frozen, x @ frozen)) == 2
    computed = weight * 2
    assert casts(lambda: (x @ computed, x @ computed)) == 2
    assert casts(lambda: (x @ weight[:], x @ weight[:])) == 2


def test_the_cache_can_be_switched_off() -> None:
    weight, x = meta(4, 4), meta(4, 4, dtype=HALF)
    assert casts(lambda: (x @ weight, x @ weight), cache_enabled=False) == 2


def test_what_an_operator_calls_is_not_cast_again() -> None:
    # linear is cast; the addmm in it sees autocast off
    with corrected(), Operators() as mode, torch.autocast("cuda"):
        F.linear(meta(3, 4), meta(5, 4), meta(5))
        assert torch.is_autocast_enabled("cuda")
    assert mode.counts["_to_copy"] == 3


@pytest.mark.parametrize(("gpu", "native"), [("A100", True), ("V100", False)])
def test_bfloat16_support_is_that_of_the_gpu(gpu: str, native: bool) -> None:
    with corrected(gpu):
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.is_bf16_supported(including_emulation=False) is native


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_enters_the_region_again(reentrant: bool) -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to("meta")

    def run() -> Tensor:
        with torch.autocast("cuda"):
            output: Tensor = checkpoint(layer, meta(3, 4), use_reentrant=reentrant)
        return output

    with corrected(), Operators() as mode:
        output = run()
        before = mode.counts["_to_copy"]
        output.sum().backward()  # type: ignore[no-untyped-call]
    assert output.dtype == HALF
    # twice: input, two weights, two biases; in the backward pass also the gradients of all these
    assert (before, mode.counts["_to_copy"]) == (5, 15)


def test_what_is_recomputed_within_the_region_ends_the_casts() -> None:
    # The engine's thread has regions of its own, and the cache is that of all threads.
    first, last = (nn.Linear(4, 4, device="meta") for _ in range(2))

    def run() -> None:
        output: Tensor = last(checkpoint(first, meta(3, 4), use_reentrant=False))
        output.sum().backward()  # type: ignore[no-untyped-call]
        last(output.detach())

    assert casts(run) == 15  # with those of weight and bias of the last layer, once more


def test_functions_that_ask_for_a_type_get_it() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
        def forward(ctx: object, x: Tensor) -> Tensor:
            assert not torch.is_autocast_enabled("cuda")
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * 2

    with corrected(), torch.autocast("cuda"):
        output = Double.apply(meta(2, 3, dtype=HALF))  # type: ignore[no-untyped-call]
    assert output.dtype == torch.float32
    output.sum().backward()


def test_a_scaled_step_steps() -> None:
    layer = nn.Linear(4, 5, device="meta")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with corrected(), Operators() as mode:
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        with torch.autocast("cuda"):
            loss = layer(meta(3, 4)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0
        assert scaler.state_dict()["_growth_tracker"] == 0
    assert len(optimizer.state) == 2
    assert mode.counts["_amp_foreach_non_finite_check_and_unscale_"] == 1
    assert mode.counts["_amp_update_scale_"] == 1
