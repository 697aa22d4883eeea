"""The blocks of named models are those that the modules of ``transformers`` execute."""

from typing import Any

import pytest

from gpumemnet.job.layers import Layer
from gpumemnet.named.architectures import network
from gpumemnet.named.operators import Network, Operator

TOKENS = 32
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def layers(built: Network) -> tuple[Layer, ...]:
    """The layers of a job with these operators."""
    found: list[Layer] = []
    blocks = 0
    for section in built.sections:
        plain = [layer for each in section.operators for layer in layers_of(each)]
        for _ in range(section.count):
            blocks += section.is_checkpointed
            number = blocks if section.is_checkpointed else 0
            found += [each._replace(trains=each.parameters > 0, block=number) for each in plain]
    if built.tied_parameters:
        found[-1] = found[-1]._replace(parameters=found[-1].parameters - built.tied_parameters)
    return tuple(found)


def layers_of(operator: Operator) -> list[Layer]:
    """What is extracted of an operator: some are several layers."""
    elements, parameters = operator.elements, operator.parameters
    if operator.kind == "loss":
        return []
    if operator.kind == "rms_norm":
        return [Layer("rms_norm", elements), Layer("multiply", elements, parameters)]
    if operator.kind == "rotary":
        halves = [Layer("other", elements // 2), Layer("concatenate", elements)]
        return [
            Layer("multiply", elements),
            *halves,
            Layer("multiply", elements),
            Layer("add", elements),
        ]
    return [Layer(operator.kind, elements, parameters)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("LlamaForCausalLM", GROUPED),
        ("MistralForCausalLM", GROUPED),
        ("Qwen2ForCausalLM", GROUPED),
        ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 32}),
        ("GemmaForCausalLM", {**SIZES, "num_key_value_heads": 1, "head_dim": 16}),
        ("Olmo2ForCausalLM", SIZES),
        ("Starcoder2ForCausalLM", GROUPED),
        ("GPTNeoXForCausalLM", SIZES),
    ],
)
def test_layers_are_those_of_extract(name: str, sizes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from gpumemnet.extract import ExtractOptions, extract_job
    from gpumemnet.torch_private.names import declare_torchvision_operators

    declare_torchvision_operators()
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes)
    with torch.device("meta"):
        model = kind(config)
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    extracted = extract_job(model, {"input_ids": tokens}, ExtractOptions(precision="bf16"))
    built = network({**config.to_dict(), "architectures": [name]}, TOKENS)
    assert layers(built) == extracted.job.layers
    assert built.parameters == extracted.job.total_parameters
