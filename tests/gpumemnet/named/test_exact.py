"""The exact depth of ``gpumemnet fit`` beside the instant one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.cli import main
from gpumemnet.named.fit import fit
from tests.nightly import nightly

SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "intermediate_size": 3072,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
LLAMA = SIZES | {"model_type": "llama", "num_hidden_layers": 12, "num_key_value_heads": 4}
MIXTURE = SIZES | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
BERT = SIZES | {
    "model_type": "bert",
    "num_hidden_layers": 12,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
T5 = {
    "model_type": "t5",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_decoder_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {"depth": 2, "hidden_size": 256, "num_heads": 4, "out_hidden_size": 512}
TOWER: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "vision_config": VISION,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
    "qkv_bias": True,
    "tie_word_embeddings": False,
}
PIXART = "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS"
FLUX = "black-forest-labs/FLUX.2-klein-base-4B"
SCALES = {"peft_type": "IA3", "target_modules": ["to_q"], "feedforward_modules": []}
NORMS = {"peft_type": "LN_TUNING", "target_modules": ["norm_q"]}
NEEDED = ("transformers", "peft", "bitsandbytes", "diffusers")
MISSING = [package for package in NEEDED if importlib.util.find_spec(package) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize(
    ("config", "method"), [(LLAMA, "lora"), (MIXTURE, "full"), *nightly([(BERT, "full")])]
)
def test_both_depths_agree(config: dict[str, object], method: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options: dict[str, Any] = {"method": method, "sequence_length": 512, "gpu": "A100-80GB"}
    instant, exact = fit(str(path), **options), fit(str(path), exact=True, **options)
    assert (instant.depth, exact.depth) == ("instant", "exact")
    assert sum(exact.parts.values()) == exact.expected_bytes <= exact.safe_bytes
    assert exact.parts.keys() == instant.parts.keys()
    assert exact.expected_bytes == pytest.approx(instant.expected_bytes, rel=0.06)
    assert exact.parameters == pytest.approx(instant.parameters, rel=0.01)


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize(
    ("model", "method", "trained"),
    [
        (T5, "full", None),
        (TOWER, "full", None),
        (FLUX, NORMS, 25 * 128),  # which are no linear layers
        *nightly([(PIXART, "full", None), (FLUX, SCALES, 5 * 3072)]),
    ],
)
def test_models_and_adapters_of_other_kinds_are_traced(
    model: str | dict[str, object],
    method: str | dict[str, object],
    trained: int | None,
    tmp_path: Path,
) -> None:
    if isinstance(model, dict):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(model))
        model = str(path)
    exact = fit(model, method=method, exact=True)
    assert exact.depth == "exact", exact.notes
    assert sum(exact.parts.values()) == exact.expected_bytes
    assert exact.trained_parameters == (trained or exact.parameters)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (
            "meta-llama/Llama-3.2-1B",
            ("--gpus", "2xA100", "--parallel", "zero3", "--method", "qlora"),
            "DeepSpeed's partitions",
        ),
        ("Qwen/Qwen-7B", ("--method", "lora"), "'qwen'"),
    ],
)
def test_what_cannot_be_traced_has_the_instant_answer(
    model: str, options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["fit", model, *options, "--json"]
    assert main(asked) in (0, 3)
    instant = json.loads(capsys.readouterr().out)
    assert main([*asked, "--exact"]) in (0, 3)
    exact = json.loads(capsys.readouterr().out)
    assert exact["depth"] == "instant"
    (note,) = set(exact.pop("notes")) - set(instant.pop("notes"))
    assert "not traced" in note
    assert reason in note
    assert exact == instant


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize(
    ("parallel", "copy_bytes"), [("fsdp2", 0), *nightly([("fsdp1", 0), ("zero2", 2)])]
)
def test_ranks_hold_their_share_in_fp32(parallel: str, copy_bytes: int, tmp_path: Path) -> None:
    if parallel == "zero2":
        pytest.importorskip("deepspeed", reason="needs DeepSpeed, which the trace runs")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    asked: dict[str, Any] = {"gpu": "4xA100", "parallel": parallel, "sequence_length": 16}
    asked["precision"] = "amp_fp16" if parallel == "fsdp1" else "bf16"  # its scaler is its own
    found = fit(str(path), exact=True, **asked)
    assert found.depth == "exact", found.notes
    assert sum(found.parts.values()) == found.expected_bytes
    count, ranks = found.parameters, 4
    weights = pytest.approx(copy_bytes * count + 4 * count / ranks, rel=1e-3)
    assert found.parts["base_weights_bytes"] == weights
    assert found.parts["optimizer_bytes"] == pytest.approx(8 * count / ranks, rel=1e-3)


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize(
    "config",
    [
        MIXTURE,
        *nightly(
            [
                {
                    "model_type": "falcon",
                    "new_decoder_architecture": True,
                    "parallel_attn": True,
                    "tie_word_embeddings": True,
                    "hidden_size": 1024,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 2,
                    "intermediate_size": 4096,
                    "vocab_size": 8000,
                }
            ]
        ),
    ],
)
def test_a_quantised_base_is_the_same_at_both_depths(
    config: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    asked: dict[str, Any] = {"method": "qlora", "lora_target": "q_proj,query_key_value"}
    weights = [
        fit(str(path), exact=each, **asked).parts["base_weights_bytes"] for each in (True, False)
    ]
    assert weights[0] == pytest.approx(weights[1], rel=0.03)
