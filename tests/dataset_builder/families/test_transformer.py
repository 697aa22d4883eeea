"""The transformer family: what it says about a network is what torch builds and runs, and its
samples cover the space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dataset_builder.families import (
    TensorSpec,
    extracted_job,
    loss,
    transformer,
)
from dataset_builder.families import transformer as space
from dataset_builder.families.transformer import TransformerArchitecture
from dataset_builder.measure.training import build_network, train
from dataset_builder.planned_job import (
    Options,
    PlannedJob,
    rough_bytes,
    training_job,
)
from gpumemnet.job.layers import LAYER_GROUPS
from gpumemnet.job.training_job import PRECISIONS
from tests.nightly import every_pair

CPU = torch.device("cpu")

TINY: dict[str, Any] = {
    "style": "decoder",
    "depth": 2,
    "width": 32,
    "head_size": 8,
    "heads_per_group": 2,
    "feed_forward_ratio": 2.0,
    "gated": True,
    "activation": "silu",
    "norm": "rms_norm",
    "norm_position": "pre",
    "positions": "rotary",
    "bias": False,
    "fused_projection": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "attention_kernel": "math",
    "sequence_length": 10,
    "target_share": 0.5,
    "vocabulary": 50,
    "patch_size": 4,
    "head": "tied",
    "classes": 5,
}


def tiny(**changes: Any) -> TransformerArchitecture:
    return transformer.compose(TINY | changes)


def batch_of(specs: Sequence[TensorSpec], samples: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(samples, *spec.shape, device=device)
        if spec.high is None
        else torch.zeros(samples, *spec.shape, dtype=torch.int64, device=device)
        for spec in specs
    )


GPT2 = {
    "depth": 12,
    "width": 768,
    "head_size": 64,
    "heads_per_group": 1,
    "feed_forward_ratio": 4.0,
    "gated": False,
    "activation": "gelu",
    "norm": "layer_norm",
    "positions": "learned",
    "bias": True,
    "fused_projection": True,
    "sequence_length": 1024,
    "vocabulary": 50_257,
}
VIT_B = {**GPT2, "style": "vision", "patch_size": 16, "sequence_length": 197, "classes": 1000}
LLAMA = {
    "depth": 32,
    "width": 4096,
    "head_size": 128,
    "heads_per_group": 1,
    "feed_forward_ratio": 11_008 / 4096,
    "sequence_length": 2048,
    "vocabulary": 32_000,
    "head": "untied",
}
LLAMA3 = {**LLAMA, "heads_per_group": 4, "feed_forward_ratio": 3.5, "vocabulary": 128_256}


@pytest.mark.parametrize(
    ("values", "parameters"),
    [(GPT2, 124_439_808), (VIT_B, 86_567_656), (LLAMA, 6_738_415_616), (LLAMA3, 8_030_261_248)],
    ids=["GPT-2", "ViT-B/16", "Llama 7B", "Llama 3 8B"],
)
def test_published_networks_are_in_the_space(values: dict[str, Any], parameters: int) -> None:
    job = training_job(PlannedJob("transformer", tiny(**values), Options(batch_size=1)))
    assert job.total_parameters == parameters


@pytest.mark.parametrize(
    ("style", "precision"), every_pair(space.FEATURES["style"].choices, PRECISIONS)
)
def test_every_style_trains_in_every_precision_with_and_without_recomputation(
    style: str, precision: str
) -> None:
    plain = Options(batch_size=2, precision=precision, optimizer="adamw")
    recomputed = replace(
        plain, checkpointing="every_block", frozen_share=0.4, gradient_accumulation=2
    )
    other = {"norm": "layer_norm", "positions": "learned", "norm_position": "post", "gated": False}
    for options, changes in ((plain, {}), (recomputed, other)):
        planned = PlannedJob("transformer", tiny(style=style, **changes), options)
        assert train(planned, CPU, 0, lambda _: 0) == 3


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def executed(
    architecture: TransformerArchitecture, device: torch.device, **options: Any
) -> Counter[str]:
    """The operators of forward and backward pass."""
    network = build_network(
        PlannedJob("transformer", architecture, Options(batch_size=2, **options)), device
    )
    inputs, target = transformer.tensors(architecture)
    batch = batch_of(inputs, 2, device)
    if options.get("precision") == "bf16":
        batch = tuple(
            each.to(torch.bfloat16) if each.is_floating_point() else each for each in batch
        )
    with Operators() as operators:
        logits = network(*batch)
        torch.autograd.backward(loss(logits, *batch_of([target], 2, device)))
    names: Counter[str] = operators.names
    return names


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 1), ("every_block", 2)])
@pytest.mark.parametrize("heads_per_group", [1, 2])
def test_the_math_kernel_runs_where_it_is_asked_for(
    checkpointing: str, times: int, heads_per_group: int
) -> None:
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    architecture = tiny(heads_per_group=heads_per_group)
    asked = executed(architecture, CPU, checkpointing=checkpointing)
    assert asked["_softmax"] + asked["_safe_softmax"] == 2 * times
    assert not asked[kernel]
    for other in ("flash", "memory_efficient"):  # without CUDA, PyTorch chooses in their place
        assert (
            executed(
                replace(architecture, attention_kernel=other), CPU, checkpointing=checkpointing
            )[kernel]
            == 2 * times
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "precision"),
    [("flash", "bf16"), ("memory_efficient", "bf16"), ("memory_efficient", "fp32")],
)
@pytest.mark.parametrize("style", space.FEATURES["style"].choices)
def test_the_fused_kernels_run_where_they_are_asked_for(
    kernel: str, precision: str, style: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    operator = {
        "flash": "_scaled_dot_product_flash_attention",
        "memory_efficient": "_scaled_dot_product_efficient_attention",
    }
    attentions = 3 if style == "encoder_decoder" else 2
    for head_size, heads_per_group in ((8, 1), (40, 2), (256, 1024)):
        changes = {
            "width": 4 * head_size,
            "head_size": head_size,
            "heads_per_group": heads_per_group,
        }
        architecture = tiny(style=style, attention_kernel=kernel, attention_dropout=0.1, **changes)
        names = executed(
            architecture, torch.device("cuda"), precision=precision, checkpointing="every_block"
        )
        assert names[operator[kernel]] == 2 * attentions
        assert names[operator[kernel] + "_backward"] == attentions


@pytest.mark.parametrize(("style", "causal"), [("decoder", True), ("encoder", False)])
@pytest.mark.parametrize("kernel", space.FEATURES["attention_kernel"].choices)
def test_only_decoders_do_not_look_ahead(style: str, causal: bool, kernel: str) -> None:
    network = build_network(
        PlannedJob(
            "transformer", tiny(style=style, attention_kernel=kernel), Options(batch_size=1)
        ),
        CPU,
    ).eval()
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, -1] = 42
    with torch.no_grad():
        difference = (network(tokens) - network(changed)).abs().amax(dim=(0, 2))
    assert bool((difference[:-1] < 1e-6).all()) == causal
    assert difference[-1] > 1e-3


def test_grouped_queries_give_what_repeated_key_value_heads_give() -> None:
    torch.manual_seed(0)
    logits = []
    for kernel in space.FEATURES[
        "attention_kernel"
    ].choices:  # the memory-efficient one is given repeated heads
        architecture = tiny(attention_kernel=kernel, dropout=0.0, heads_per_group=4)
        torch.manual_seed(0)
        network = build_network(PlannedJob("transformer", architecture, Options(batch_size=1)), CPU)
        logits.append(network(torch.arange(10)[None]))
    for each in logits[1:]:
        torch.testing.assert_close(each, logits[0])


def test_recomputation_and_kernels_move_the_estimate_as_they_move_memory() -> None:
    values = {**GPT2, "attention_kernel": "flash", "dropout": 0.1, "attention_dropout": 0.1}
    options = Options(batch_size=16, precision="bf16")

    def estimate(options: Options, **changes: Any) -> int:
        return rough_bytes(PlannedJob("transformer", tiny(**values | changes), options))

    plain = estimate(options)
    weights = 12 * 12 * 1024**2 * 2  # heads, blocks, a matrix of queries by keys in two bytes
    assert estimate(options, attention_kernel="math") >= plain + 2 * 16 * weights
    logits = 16 * 1024 * 50_257 * 2
    recomputed = estimate(replace(options, checkpointing="every_block"))
    assert 4 * logits < recomputed < 0.7 * plain
    assert plain - estimate(options, vocabulary=1000) > 3.5 * logits


def test_the_math_kernel_leaves_matrices_and_the_others_do_not() -> None:
    for kernel in space.FEATURES["attention_kernel"].choices:
        architecture = tiny(style="encoder_decoder", attention_kernel=kernel)
        layers = extracted_job("transformer", architecture).layers
        matrices = [layer.activations for layer in layers if layer.kind == "softmax"]
        fused = [layer.kind for layer in layers if layer.kind in LAYER_GROUPS["attention"]]
        assert matrices == ([4 * 10 * 10, 4 * 5 * 5, 4 * 5 * 10] if kernel == "math" else [])
        assert fused == ([] if kernel == "math" else ["attention", "attention", "cross_attention"])
