"""``gpumemnet fit``: asked by a model's name, on the command line and in Python."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpumemnet
from gpumemnet.cli import main
from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.gpu import YES
from gpumemnet.named.architectures import extracted_network, network
from gpumemnet.named.catalogue import find_model, model_names
from gpumemnet.named.fit import fit
from gpumemnet.named.step_walk import PARTS

QWEN = "Qwen/Qwen3-8B"


def test_every_model_of_the_catalogue_is_answered_and_has_its_total_of_parameters() -> None:
    for name in model_names():
        model = find_model(name)
        built = (
            network(model.config, 128)
            if model.extracted is None
            else extracted_network(model.extracted, model.extracted["size"])
        )
        computed = built.parameters
        assert model.parameters is not None
        assert abs(computed / model.parameters - 1.0) <= 0.01, name


def test_the_parts_add_up_and_adapters_need_less_than_all_parameters() -> None:
    answers = {
        method: fit(QWEN, method=method, gpu="A100-80GB", sequence_length=1024)
        for method in ("full", "lora", "qlora")
    }
    for answer in answers.values():
        assert set(answer.parts) == {*PARTS, "context_bytes"}
        assert sum(answer.parts.values()) == answer.expected_bytes <= answer.safe_bytes
    expected = [answers[method].expected_bytes for method in ("full", "lora", "qlora")]
    assert expected == sorted(expected, reverse=True)
    assert answers["lora"].trained_parameters < answers["full"].trained_parameters / 100


def test_frozen_blocks_in_fsdp1_hold_their_inputs_if_checkpointing_re_enters_autograd() -> None:
    asked: dict[str, Any] = {"gpu": "2xA100-80GB", "sequence_length": 4096, "batch_size": 4}
    hidden_states = 32 * 4 * 4096 * 4096 * 2

    def held(**method: Any) -> int:
        old, new = (
            fit("mistralai/Mistral-7B-v0.1", year=year, kernels="liger", **asked, **method)
            for year in (2025, 2026)
        )
        return old.parts["activations_bytes"] - new.parts["activations_bytes"]

    assert 0.9 * hidden_states < held(method="lora", parallel="fsdp1") < hidden_states
    assert held(method="lora", parallel="fsdp2") == 0
    assert held(method="full", parallel="fsdp1") == 0


def test_limits_are_where_the_answer_changes() -> None:
    asked: dict[str, Any] = {"method": "qlora", "gpu": "RTX-4090", "sequence_length": 512}
    largest = fit(QWEN, **asked).largest_batch
    assert largest is not None
    assert fit(QWEN, batch_size=largest, **asked).fits
    assert not fit(QWEN, batch_size=largest + largest // 16 + 1, **asked).fits


def test_python_and_command_line_give_the_same_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "lora", "--sequence-length", "4096", "--gpu", "RTX-4090", "--json"]
    code = main(["fit", QWEN, *options])
    shown = json.loads(capfd.readouterr().out)
    answer = fit(QWEN, method="lora", sequence_length=4096, gpu="RTX-4090")
    assert code == (0 if answer.fits else 3)
    assert shown["expected_bytes"] == answer.expected_bytes
    assert shown["safe_bytes"] == answer.safe_bytes
    assert gpumemnet.fit is fit


def test_what_does_not_fit_has_exit_code_3_and_names_the_next_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["fit", QWEN, "--method", "qlora", "--batch-size", "2", "--sequence-length", "4096"]
    assert main([*asked, "--gpu", "RTX-4090"]) == 3
    shown = capfd.readouterr().out
    assert "36 x Qwen3DecoderLayer" in shown
    command = next(line for line in shown.splitlines() if line.startswith(" gpumemnet fit "))
    assert main(command.split()[1:]) == 0
    others = [line for line in shown.splitlines() if not line.startswith(" gpumemnet ")]
    assert max(map(len, others)) <= 80
    plan = " gpumemnet plan Qwen/Qwen3-8B --gpu NVIDIA-GeForce-RTX-4090 --method qlora --sequence-length 4096"
    assert plan in shown


def test_several_gpus_share_weights_and_a_replica_does_not() -> None:
    asked: dict[str, Any] = {"method": "full", "sequence_length": 1024}
    one, sharded = fit(QWEN, gpu="H100", **asked), fit(QWEN, gpu="8xH100", **asked)
    replica = fit(QWEN, gpu="8xH100", parallel="ddp", **asked)
    assert sharded.method.parallel == "fsdp2"
    assert sharded.expected_bytes < one.expected_bytes < replica.expected_bytes


def test_images_and_diffusion_transformers_are_answered() -> None:
    small = fit("timm/resnet50", batch_size=16, gpu="T4", precision="amp_fp16")
    large = fit("timm/resnet50", batch_size=64, gpu="T4", precision="amp_fp16")
    assert small.expected_bytes < large.expected_bytes
    assert small.table_by == "samples of a batch"
    flux = fit("black-forest-labs/FLUX.1-dev", method="lora", gpu="A100-80GB")
    assert flux.parameters == 11_901_408_320
    assert flux.fits


def test_a_short_name_of_a_gpu_says_which_card_it_means(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", QWEN, "--method", "qlora", "--gpu", "A100"]) == 0
    assert "A100 means the 40 GB card" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Qwen/Qwen3-9B", {}),
        (QWEN, {"method": "lorra"}),
        (QWEN, {"batch_size": 0}),
        (QWEN, {"rank": 8}),
        (QWEN, {"gpu": "A1000000"}),
    ],
)
def test_wrong_questions_are_refused(model: str, options: dict[str, object]) -> None:
    with pytest.raises(FieldError):
        fit(model, **options)  # type: ignore[arg-type]


def test_a_config_file_and_a_folder_are_models(tmp_path: Path) -> None:
    config = dict(find_model(QWEN).config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = fit(QWEN, method="lora").expected_bytes
    assert fit(str(tmp_path), method="lora").expected_bytes == expected
    assert fit(str(tmp_path / "config.json"), method="lora").expected_bytes == expected


def test_the_answer_needs_no_torch() -> None:
    code = (
        "import sys, gpumemnet\n"
        f"gpumemnet.fit({QWEN!r}, method='lora', gpu='A100')\n"
        "assert not {'torch', 'transformers', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_adapters_on_no_layer_are_refused_with_the_layers_there_are() -> None:
    with pytest.raises(InvalidRequestError, match=r"its blocks have down_proj, .*q_proj") as failed:
        fit("Qwen/Qwen3-8B", method="lora", lora_target="nonsense")
    assert failed.value.field == "lora_target"


@pytest.mark.parametrize("asked", ["T4", "A100-80GB"])
def test_the_smallest_gpu_holds_the_job(asked: str) -> None:
    job: dict[str, Any] = {"method": "qlora", "sequence_length": 2048}
    smallest = fit("google/gemma-2-9b", gpu=asked, **job).smallest_gpu
    assert smallest is not None
    assert fit("google/gemma-2-9b", gpu=smallest, **job).verdict == YES


def test_what_does_not_go_together_is_said() -> None:
    notes = fit("Qwen/Qwen3-8B", parallel="fsdp2", sequence_length=131_072).notes
    assert any("name them" in note for note in notes)
    assert any("that the model was made for" in note for note in notes)


def test_no_change_repeats_an_option() -> None:
    answer = fit(QWEN, gpu="RTX-4090", sequence_length=4096, batch_size=8)
    assert answer.changes
    for change in answer.changes:
        names = [word for word in change.options.split() if word.startswith("--")]
        assert len(set(names)) == len(names)


def test_the_longest_sample_may_be_shorter_than_128_tokens() -> None:
    answer = fit(QWEN, method="lora", gpu="RTX-4090", batch_size=8, checkpointing=False)
    assert answer.longest_sequence is not None
    assert 0 < answer.longest_sequence < 128


@pytest.mark.parametrize("gpu", ["T4", "V100-32GB"])
def test_a_gpu_without_bf16_is_named(gpu: str) -> None:
    asked: dict[str, Any] = {"method": "lora", "gpu": gpu}
    model = "meta-llama/Llama-2-7b-hf"
    in_bf16, in_fp16 = (fit(model, precision=each, **asked) for each in ("bf16", "amp_fp16"))
    assert any("no arithmetic in bf16" in note for note in in_bf16.notes)
    assert in_bf16.attention.startswith("math")
    assert in_fp16.attention.startswith("memory_efficient")
    assert not any("bf16" in note for note in in_fp16.notes)


def test_bitsandbytes_leaves_experts_that_are_one_parameter() -> None:
    mixtral = "mistralai/Mixtral-8x7B-v0.1"
    old, new = (fit(mixtral, method="qlora", year=year) for year in (2025, 2026))
    left = fit(mixtral, method="qlora", raises_frozen=False)
    weights = [each.parts["base_weights_bytes"] for each in (old, left, new)]
    assert weights[0] < 30e9 < 85e9 < weights[1] < 100e9 < 180e9 < weights[2]
    assert any("experts' weights stay in 32 bits" in note for note in new.notes)


def test_a_tag_of_timm_and_a_quantised_copy_are_known_by_their_originals() -> None:
    assert find_model("timm/resnet50.a1_in1k").parameters == find_model("timm/resnet50").parameters
    copy = find_model("unsloth/Llama-3.2-3B-Instruct-unsloth-bnb-4bit")
    assert copy.source == "the catalogue, as meta-llama/Llama-3.2-3B"


def test_trained_copies_that_are_not_counted_are_named() -> None:
    adapter = {"peft_type": "LORA", "r": 8, "modules_to_save": ["lm_head"]}
    notes = fit(QWEN, method=adapter).notes
    assert any("without trained copies of lm_head, so too low" in note for note in notes)


def test_a_sample_longer_than_the_model_was_made_for_is_within_the_limit() -> None:
    answer = fit("gpt2", sequence_length=4096, gpu="A100-80GB")
    assert answer.longest_sequence is not None
    assert answer.fits
    assert answer.longest_sequence >= 4096


@pytest.mark.parametrize(
    ("model", "elements"),
    [("Qwen/Qwen3-30B-A3B", 996_507_648), ("allenai/OLMoE-1B-7B-0924", 189_284_352)],
)
def test_experts_have_the_adapters_that_peft_gives_them(model: str, elements: int) -> None:
    assert fit(model, method="lora").trained_parameters == elements


def test_blocks_that_transformers_cannot_recompute_are_not_counted_so() -> None:
    answer = fit("albert/albert-base-v2")
    assert not answer.method.checkpointing
    assert any("cannot recompute" in note for note in answer.notes)
    assert {row["checkpointing"] for row in answer.table} == {False}


def test_full_fine_tuning_trains_every_parameter() -> None:
    answer = fit("FacebookAI/roberta-large", sequence_length=512)
    assert answer.trained_parameters == answer.parameters


def test_zero2_keeps_a_copy_of_half_weights_in_fp32() -> None:
    gpus = 8
    asked: dict[str, Any] = {"gpu": f"{gpus}xH100", "parallel": "zero2"}
    half, full = (fit(QWEN, precision=each, **asked) for each in ("bf16", "amp_bf16"))
    assert half.parts["optimizer_bytes"] == pytest.approx(12 * half.parameters / gpus, rel=0.01)
    assert full.parts["optimizer_bytes"] == pytest.approx(8 * full.parameters / gpus, rel=0.01)


def test_qlora_is_safe_in_less_memory_than_lora() -> None:
    lora, qlora = (fit(QWEN, method=each, gpu="A100") for each in ("lora", "qlora"))
    assert qlora.safe_bytes < lora.safe_bytes
