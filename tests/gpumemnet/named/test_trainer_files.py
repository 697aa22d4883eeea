"""``gpumemnet fit`` of a trainer's file: what each trainer's keys, and their absence, mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpumemnet
from gpumemnet.cli import main
from gpumemnet.errors import InvalidRequestError
from gpumemnet.named.methods import Method
from gpumemnet.named.trainer_files import TrainerFile, read_trainer_file

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
datasets: [{path: my/chats, type: chat_template}]
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
optimizer: paged_adamw_8bit
attn_implementation: flash_attention_2
learning_rate: 2e-4
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
finetuning_type: full
template: qwen3_nothink
dataset: chats
per_device_train_batch_size: 1
bf16: true
deepspeed: examples/deepspeed/ds_z2_offload_config.json
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: my/chats
use_peft: true
lora_target_modules: [q_proj, v_proj]
learning_rate: 1e-4
"""
TORCHTUNE = """
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 64
  lora_alpha: 128
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
checkpointer: {checkpoint_dir: /tmp/Meta-Llama-3.1-8B-Instruct, model_type: LLAMA3}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
gradient_accumulation_steps: 8
enable_activation_checkpointing: true
dtype: bf16
"""
LITGPT = """
checkpoint_dir: checkpoints/meta-llama/Llama-2-7b-hf
precision: bf16-true
quantize: bnb.nf4
devices: 1
lora_r: 32
lora_dropout: 0.05
lora_query: true
lora_value: true
lora_mlp: true
train: {global_batch_size: 8, micro_batch_size: 2, max_seq_length: 512}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 2e-4}}
"""
TRAINER = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "bf16": True,
    "optim": "adafactor",
    "gradient_checkpointing": True,
    "use_liger_kernel": True,
    "fsdp": "full_shard auto_wrap",
}


def read(tmp_path: Path, text: str, name: str = "training.yaml") -> TrainerFile:
    path = tmp_path / name
    path.write_text(text)
    found = read_trainer_file(str(path))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "trainer", "model", "expected"),
    [
        pytest.param(
            AXOLOTL,
            "axolotl",
            "NousResearch/Meta-Llama-3-8B",
            {
                "method": "qlora",
                "lora_rank": 32,
                "sequence_length": 512,
                "batch_size": 2,
                "gradient_accumulation": 4,
                "optimizer": "paged_adamw_8bit",
                "implementation": "foreach",
                "attention": "flash",
                "kernels": "fused_loss",
                "raises_frozen": False,
            },
            id="axolotl",
        ),
        pytest.param(
            LLAMA_FACTORY,
            "LLaMA-Factory",
            "Qwen/Qwen3-4B-Instruct-2507",
            {
                "method": "full",
                "sequence_length": 2048,
                "precision": "amp_bf16",
                "parallel": "zero2",
                "raises_frozen": True,
                "frozen_bytes": 4,
            },
            id="llama-factory",
        ),
        pytest.param(
            TRL,
            "TRL",
            "Qwen/Qwen2.5-0.5B",
            {
                "method": "lora",
                "lora_target": "q_proj,v_proj",
                "sequence_length": 1024,
                "batch_size": 8,
                "precision": "amp_bf16",
                "frozen_bytes": 4,
                "kernels": "fused_loss",
            },
            id="trl",
        ),
        pytest.param(
            TORCHTUNE,
            "torchtune",
            "Meta-Llama-3.1-8B-Instruct",
            {
                "method": "lora",
                "lora_rank": 64,
                "lora_target": "q_proj,v_proj,o_proj,gate_proj,down_proj,up_proj",
                "sequence_length": 4096,
                "batch_size": 2,
                "gradient_accumulation": 8,
                "has_autocast": False,
                "adapter_bytes": 2,
                "kernels": "fused_loss",
                "parallel": "fsdp2",
                "raises_frozen": False,
            },
            id="torchtune",
        ),
        pytest.param(
            LITGPT,
            "litgpt",
            "meta-llama/Llama-2-7b-hf",
            {
                "method": "qlora",
                "quantisation": "nf4",
                "lora_rank": 32,
                "lora_dropout": 0.05,
                "lora_target": "q_proj,v_proj,gate_proj,up_proj,down_proj",
                "sequence_length": 512,
                "batch_size": 2,
                "gradient_accumulation": 4,
                "optimizer": "paged_adamw",
                "implementation": "foreach",
                "checkpointing": False,
                "library": "litgpt",
                "adapter_bytes": 2,
                "has_autocast": False,
                "raises_logits": False,
                "raises_frozen": False,
                "parallel": "fsdp2",
            },
            id="litgpt",
        ),
        pytest.param(
            json.dumps(TRAINER),
            "Trainer",
            None,
            {
                "batch_size": 4,
                "optimizer": "adafactor",
                "implementation": "foreach",
                "kernels": "liger",
                "parallel": "fsdp2",
                "raises_frozen": False,
            },
            id="trainer",
        ),
    ],
)
def test_each_trainers_file_becomes_a_model_and_a_method(
    tmp_path: Path, text: str, trainer: str, model: str | None, expected: dict[str, Any]
) -> None:
    name = "arguments.json" if trainer == "Trainer" else "training.yaml"
    found = read(tmp_path, text, name)
    assert (found.trainer, found.model) == (trainer, model)
    assert Method(**found.method) == Method(**expected)
    assert found.unknown == ()


def test_defaults_that_decide_are_stated(tmp_path: Path) -> None:
    assert read(tmp_path, AXOLOTL).defaults == {"bf16": True, "sequence_len": 512}
    assert read(tmp_path, TRL).defaults["dtype"] == "float32"
    checkpoints = {
        text: Method(**read(tmp_path, text).method).checkpointing
        for text in (AXOLOTL.replace("gradient_checkpointing: true", ""), LLAMA_FACTORY, TRL)
    }
    assert list(checkpoints.values()) == [False, True, True]


def test_no_key_is_ignored_in_silence(tmp_path: Path) -> None:
    text = AXOLOTL.replace("bf16", "")
    text += "galactic_mode: 7\nactivation_offloading: true\nqat: {group_size: 32}\n"
    text += "context_parallel_size: 1\nlayer_offloading: false\n"
    found = read(tmp_path, text)
    assert found.unknown == ("galactic_mode",)
    assert found.saving == ("activation_offloading",)
    assert found.costing == ("qat.*",)
    answer = gpumemnet.fit(yaml.safe_load(text))
    for named in ("galactic_mode", "activation_offloading", "qat", "sequence_len 512"):
        assert any(named in note for note in answer.notes)


def test_preferences_are_pairs_beside_a_reference_model(tmp_path: Path) -> None:
    found = read(tmp_path, AXOLOTL.replace("adapter: qlora\nload_in_4bit: true", "rl: dpo"))
    assert found.method["batch_size"] == 4
    assert found.costing == ("the reference model of preferences",)


def test_completions_of_grpo_are_samples_as_long_as_prompt_and_answer(tmp_path: Path) -> None:
    stated = (
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nnum_generations: 4\nmax_completion_length: 1000"
    )
    file = read(tmp_path, stated)
    assert (file.trainer, file.method["sequence_length"], file.method["batch_size"]) == (
        *("TRL", 1512, 8),
    )
    assert "the generation of completions" in file.costing


def test_a_base_that_the_file_loads_in_fp32_is_the_first_to_change(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    keys = ["use_peft: true", "max_length: 1024", "per_device_train_batch_size: 1"]
    path.write_text("\n".join(["model_name_or_path: Qwen/Qwen3-8B", *keys]))
    answer = gpumemnet.fit(str(path), gpu="L4")
    change = answer.changes[0]
    assert change.options.startswith("--precision amp_bf16")
    halved = gpumemnet.fit(str(path), gpu="L40S", precision="amp_bf16")
    assert halved.parts["base_weights_bytes"] < 0.6 * answer.parts["base_weights_bytes"]


def test_a_deepspeed_file_beside_it_gives_the_stage(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    (tmp_path / "shards.json").write_text(json.dumps(config))
    text = LLAMA_FACTORY.replace("examples/deepspeed/ds_z2_offload_config.json", "shards.json")
    found = read(tmp_path, text)
    assert found.method["parallel"] == "zero3"
    assert found.saving == ("deepspeed.zero_optimization.offload_param.device=cpu",)


def test_options_override_the_file_and_python_answers_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(AXOLOTL)
    code = main(["fit", str(path), "--batch-size", "3", "--gpu", "2xRTX-4090", "--json"])
    shown = json.loads(capfd.readouterr().out)
    answer = gpumemnet.fit(str(path), batch_size=3, gpu="2xRTX-4090")
    assert code == (0 if answer.fits else 3)
    assert shown["expected_bytes"] == answer.expected_bytes
    assert (answer.method.batch_size, answer.method.gpus, answer.method.lora_rank) == (3, 2, 32)
    typed = ["fit", str(path), "--no-checkpointing", "--gpu", "RTX-4090"]
    assert main([*typed, "--sequence-length", "8192"]) == 3
    shown = capfd.readouterr().out.splitlines()
    command = next(line.split()[1:] for line in shown if line.startswith(" gpumemnet fit"))
    assert command[:2] == typed[:2]
    assert {"--sequence-length", "8192"} <= set(command)
    assert main(command) == 0
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps(TRAINER))
    assert main(["fit", str(arguments), "--base-model", "Qwen/Qwen3-8B"]) == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("base_model: gpt2\nmicro_batch_size: many\n", "training.yaml: micro_batch_size"),
        ("base_model: gpt2\nadapter: prefix\n", "training.yaml: adapter"),
        ("base_model: [unclosed\n", "training.yaml"),
        ("- a list\n", "training.yaml"),
        ("distributed_type: FSDP\n", "training.yaml"),
        ("model: {_component_: torchtune.models.gemma.gemma_2b}\n", "training.yaml: optimizer"),
        ("learning_rate: 1.0e-4\n", "--base-model"),
        ("base_model: nobody/knows-this\n", "nobody/knows-this"),
        ("base_model: gpt2\nmicro_batch_size: 0\n", "training.yaml: micro_batch_size"),
    ],
)
def test_mistakes_are_one_sentence_with_file_and_key(
    tmp_path: Path,
    text: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "training.yaml"
    path.write_text(text)
    assert main(["fit", str(path)]) == 2
    error = capfd.readouterr().err
    assert named in error.replace("\n", "")
    assert "Traceback" not in error


def test_a_field_that_is_no_option_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="is no option") as caught:
        gpumemnet.fit("gpt2", lora_rnak=8)
    assert caught.value.field == "lora_rnak"


@pytest.mark.parametrize(
    ("stated", "target"),
    [
        ("", "q_proj,v_proj"),
        ("lora_target_linear: true", "all-linear"),
        ("lora_target_linear: false\nlora_target_modules: [q_proj, o_proj]", "q_proj,o_proj"),
    ],
)
def test_axolotl_reads_its_targets_from_two_keys(tmp_path: Path, stated: str, target: str) -> None:
    found = read(tmp_path, f"base_model: Qwen/Qwen3-8B\nadapter: lora\n{stated}\n")
    assert Method(**found.method).lora_target == target
    assert ("lora_target_modules" in found.defaults) == (not stated)


def test_a_file_by_command_line_its_path_and_its_keys_have_one_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "training.yaml"
    path.write_text(AXOLOTL)
    main(["fit", str(path), "--gpu", "RTX-4090", "--json"])
    asked = (str(path), yaml.safe_load(AXOLOTL))
    written = [json.dumps(gpumemnet.fit(each, gpu="RTX-4090").document()) for each in asked]
    assert {*written, json.dumps(json.loads(capfd.readouterr().out))} == {written[0]}
