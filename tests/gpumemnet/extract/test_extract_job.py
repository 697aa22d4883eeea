"""From a model object to a job: layers in execution order, totals that are the model's own."""

import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumemnet.errors import ExtractError, InvalidJobError
from gpumemnet.extract import Extraction, ExtractOptions, extract_job
from gpumemnet.job.json_codec import job_from_json, job_to_json

OPTIONS = ExtractOptions(optimizer="adam", precision="fp32")


def extract(
    model: nn.Module, *inputs: Tensor, batch_size: int | None = None, **options: Any
) -> Extraction:
    extraction = extract_job(model, inputs, replace(OPTIONS, **options), batch_size=batch_size)
    assert extraction.job.total_parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert len(extraction.layer_names) == len(extraction.job.layers)
    return extraction


def triples(extraction: Extraction) -> list[tuple[str, int, int]]:
    return [(layer.kind, layer.activations, layer.parameters) for layer in extraction.job.layers]


def kinds(extraction: Extraction) -> list[str]:
    return [layer.kind for layer in extraction.job.layers]


MLP_LAYERS = [("linear", 16, 144), ("relu", 16, 0), ("dropout", 16, 0), ("linear", 4, 68)]


def test_modules_and_functions_give_the_same_layers(small: ModuleType) -> None:
    modules = extract(small.ModuleMLP(), torch.zeros(32, 8))
    functions = extract(small.FunctionalMLP(), torch.zeros(32, 8))
    assert triples(modules) == triples(functions) == MLP_LAYERS
    assert modules.layer_names == ("first", "act", "drop", "second")
    assert modules.job.batch_size == 32
    assert modules.job.input_elements == 8
    assert modules.job.family == "mlp"
    assert modules.job.activation_function == "relu"
    assert modules.job.sequence_length is None
    assert modules.job.attention_kernel is None
    assert modules.notes == ()


def test_every_functional_layer_is_seen(small: ModuleType) -> None:
    extraction = extract(small.Functions(), torch.zeros(2, 4, 8, 8))
    assert kinds(extraction) == [
        *("conv2d", "batch_norm2d", "relu", "add", "layer_norm", "gelu", "sigmoid", "concatenate"),
        *("upsample", "max_pool", "pad", "linear", "matmul", "softmax", "attention"),
        "adaptive_avg_pool",
    ]
    by_kind = {layer.kind: layer for layer in extraction.job.layers}
    assert by_kind["conv2d"].parameters == 144
    assert by_kind["layer_norm"].parameters == 16
    assert by_kind["linear"].parameters == 64
    assert by_kind["upsample"].activations == 8 * 16 * 16


def test_a_shared_module_is_a_layer_each_time_and_owns_its_parameters_once(
    small: ModuleType,
) -> None:
    extraction = extract(small.Shared(), torch.zeros(2, 8))
    assert triples(extraction) == [
        ("linear", 8, 72),
        ("relu", 8, 0),
        *[("linear", 8, 0), ("relu", 8, 0)] * 2,
    ]


def test_parameters_outside_executed_layers_are_counted_and_named(small: ModuleType) -> None:
    extraction = extract(small.Unused(), torch.zeros(2, 8))
    assert triples(extraction) == [("linear", 16, 149), *MLP_LAYERS[1:], ("other", 0, 900)]
    assert extraction.layer_names[-1] == "(unused)"
    assert any(
        "used.extra" in note and "first layer of its module" in note for note in extraction.notes
    )
    assert any(
        "spare.weight, spare.bias" in note and "last layer" in note for note in extraction.notes
    )


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_layer_outputs_its_states_too(small: ModuleType, batch_first: bool) -> None:
    extraction = extract(small.Recurrent(batch_first), torch.zeros(4, 9, 8))
    assert triples(extraction)[0] == (
        "lstm",
        9 * 16 + 2 * 2 * 16,
        2 * (4 * 16 * (16 + 2)) + 4 * 16 * (8 + 16),
    )
    assert extraction.job.sequence_length == 9


def test_under_the_math_kernel_attention_is_its_steps() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                x, x[:, :2], x[:, :2, :, :8], None, 0.1, enable_gqa=True
            )

    def layers(kernel: str) -> tuple[list[tuple[str, int]], int | None, str]:
        x = torch.zeros(2, 4, 5, 16)
        job = extract_job(Attends(), x, replace(OPTIONS, attention_kernel=kernel)).job
        return (
            [(layer.kind, layer.activations) for layer in job.layers],
            job.sequence_length,
            job.family,
        )

    scores = [(kind, 4 * 5 * 5) for kind in ("matmul", "softmax", "dropout")]
    assert layers("math") == ([*scores, ("matmul", 4 * 5 * 8)], 5, "transformer")
    assert layers("flash") == ([("attention", 4 * 5 * 8)], 5, "transformer")


def test_an_encoder_decoder_takes_two_inputs(small: ModuleType) -> None:
    extraction = extract(small.Seq2Seq(), torch.zeros(2, 6, 16), torch.zeros(2, 5, 16))
    assert kinds(extraction).count("attention") == 4
    assert kinds(extraction).count("cross_attention") == 2
    assert kinds(extraction).count("layer_norm") == 12
    assert extraction.job.sequence_length == 6
    assert extraction.job.input_elements == 11 * 16
    assert extraction.job.attention_kernel == "memory_efficient"
    assert extraction.notes == (
        "The input elements are those of all 2 inputs together.",
        "attention_kernel: PyTorch would choose memory_efficient on NVIDIA A100-SXM4-40GB in fp32.",
    )


def test_a_loss_inside_the_model_is_no_layer(small: ModuleType) -> None:
    model, inputs = small.with_loss()
    extraction = extract_job(model, inputs, OPTIONS)
    assert kinds(extraction) == ["embedding", "linear", "other"]
    assert extraction.job.sequence_length == 7
    assert any("1 loss value(s)" in note for note in extraction.notes)


def test_gated_units_are_recognised(small: ModuleType) -> None:
    assert extract(small.Gated(), torch.zeros(2, 8)).job.activation_function == "swiglu"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointing_in_the_model_is_noticed(small: ModuleType, reentrant: bool) -> None:
    model, inputs = small.Checkpointed(reentrant), torch.zeros(2, 8)
    extraction = extract(model, inputs)
    assert triples(extraction) == MLP_LAYERS
    assert any("torch.utils.checkpoint" in note for note in extraction.notes)
    assert extract(model, inputs, checkpointing="every_block").notes == ()


def test_computed_weights_and_parametrisations_are_followed(
    small: ModuleType,
) -> None:
    assert triples(extract(small.Standardised(), torch.zeros(2, 3, 9, 9))) == [
        ("conv2d", 4 * 7 * 7, 108)
    ]
    assert triples(extract(small.weight_normed(), torch.zeros(2, 8))) == [("linear", 4, 40)]


def test_frozen_parameters_are_not_trainable(small: ModuleType) -> None:
    job = extract(small.Frozen(), torch.zeros(2, 8)).job
    assert [layer.kind for layer in job.layers] == ["linear", "relu", "dropout", "linear"]
    assert (job.total_parameters, job.trainable_parameters) == (212, 68)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = [id(parameter) for parameter in model.parameters()]
    extract(model, torch.zeros(2, 8))
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, True, False]
    assert model(torch.ones(2, 8)).shape == (2, 6)


def test_options_survive_json(small: ModuleType) -> None:
    options: dict[str, Any] = {"attention_kernel": "flash", "channels_last": True}
    job = extract(small.ModuleMLP(), torch.zeros(2, 8), gradient_accumulation=4, **options).job
    assert (job.attention_kernel, job.channels_last, job.gradient_accumulation) == (
        "flash",
        True,
        4,
    )
    assert job_from_json(job_to_json(job)) == job


@pytest.mark.parametrize(
    ("how", "operator"),
    [
        ("item", "Tensor.item"),
        ("branch", "Tensor.__bool__"),
        ("nonzero", "Tensor.__getitem__"),
        ("numpy", "Tensor.numpy"),
    ],
)
def test_code_that_needs_values_is_named_with_its_line(
    broken: ModuleType, how: str, operator: str
) -> None:
    with pytest.raises(
        ExtractError, match=rf"broken\.py line \d+, in forward: {operator}"
    ) as raised:
        extract(broken.Reads(how), torch.zeros(2, 8))
    assert "\n" not in str(raised.value)


def test_wrong_options_are_refused_with_their_name(small: ModuleType) -> None:
    with pytest.raises(InvalidJobError, match="optimizer: must be"):
        ExtractOptions(optimizer="lion")
    with pytest.raises(InvalidJobError, match="batch_size: must be"):
        extract_job(small.ModuleMLP(), torch.zeros(2, 8), batch_size=0)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ExtractError, match="no known layer"):
        extract(nn.Flatten(), torch.zeros(2, 8))


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, gpumemnet.extract, gpumemnet.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class WrittenRMSNorm(nn.Module):
    """As the models of transformers have it."""

    def __init__(self, width: int, is_fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.is_fused = is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_fused:
            return nn.functional.rms_norm(x, (x.shape[-1],), self.weight)
        full = x.float()
        return self.weight * (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )


def test_a_norm_in_elementary_operations_is_two_layers() -> None:
    def layers(norm: nn.Module) -> list[tuple[str, int, int]]:
        model = nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2))
        extraction = extract_job(model, torch.zeros(3, 4))
        assert extraction.job.total_parameters == 40 + 8 + 18
        return triples(extraction)[1:-1]

    twice = WrittenRMSNorm(8, is_fused=False)
    assert layers(nn.Sequential(twice, twice)) == [
        ("rms_norm", 8, 0),
        ("multiply", 8, 8),
        ("rms_norm", 8, 0),
        ("multiply", 8, 0),
    ]
    assert layers(WrittenRMSNorm(8, is_fused=False)) == [("rms_norm", 8, 0), ("multiply", 8, 8)]
    assert layers(WrittenRMSNorm(8, is_fused=True)) == layers(nn.RMSNorm(8)) == [("rms_norm", 8, 8)]


class _NormAndActivation(nn.BatchNorm2d):
    """A norm that contains its activation, as timm's ``BatchNormAct2d``."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, images: Tensor) -> Tensor:
        normalised: Tensor = self.act(super().forward(images))
        return normalised


def test_a_norm_with_an_activation_inside_is_two_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), _NormAndActivation(8))
    layers = extract_job(model, torch.empty(2, 3, 16, 16, device="meta")).job.layers
    assert [(layer.kind, layer.parameters) for layer in layers] == [
        ("conv2d", 224),
        ("batch_norm2d", 16),
        ("silu", 0),
    ]


def test_a_dropout_of_nothing_is_no_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8), nn.Dropout(0.1))
    layers = extract_job(model, torch.empty(2, 8, device="meta")).job.layers
    assert [layer.kind for layer in layers] == ["linear", "linear", "dropout"]
