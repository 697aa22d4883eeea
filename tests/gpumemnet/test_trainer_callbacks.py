"""The memory check inside trainers, with a stand-in for the GPU: everything else is real."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.errors import InvalidRequestError, JobDoesNotFitError
from gpumemnet.units import GIB, MIB

torch = pytest.importorskip("torch")
from gpumemnet.torch_private.names import declare_torchvision_operators  # noqa: E402

declare_torchvision_operators()  # without them transformers cannot be imported
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

from gpumemnet import trainer_callbacks  # noqa: E402
from gpumemnet.site.observations import read_site_rows  # noqa: E402

TOKENS, BATCH = 24, 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes of the GPU at hand, to be changed."""
    amounts = {"available_bytes": 40 * GIB, "peak_bytes": 700 * MIB}
    monkeypatch.setattr(
        trainer_callbacks,
        "gpu_at_hand",
        lambda: trainer_callbacks.GpuAtHand("NVIDIA A100-SXM4-40GB", **amounts),
    )
    return amounts


def causal_model() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    return transformers.LlamaForCausalLM(config)


def classifier() -> Any:
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=512,
    )
    return transformers.BertForSequenceClassification(config)


def trainer(folder: Path, model: Any, callback: Any, **options: Any) -> Any:
    labels = list(range(TOKENS)) if "Causal" in type(model).__name__ else 1
    data = [{"input_ids": list(range(TOKENS)), "labels": labels}] * 6
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])


def test_a_run_that_does_not_fit_stops_before_its_first_step(
    gpu: dict[str, int], tmp_path: Path
) -> None:
    gpu["available_bytes"] = 100 * MIB
    callback = trainer_callbacks.MemoryCheckCallback()
    run = trainer(tmp_path, causal_model(), callback)
    with pytest.raises(JobDoesNotFitError, match=r"takes .* and 100 MiB are free: use"):
        run.train()
    assert run.state.global_step == 0
    assert callback.answer.expected_bytes > 100 * MIB
    assert issubclass(JobDoesNotFitError, RuntimeError)


def test_a_warning_lets_it_start(
    gpu: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu["available_bytes"] = 100 * MIB
    run = trainer(tmp_path, causal_model(), trainer_callbacks.MemoryCheckCallback("warn"))
    run.train()
    assert run.state.global_step == 2
    assert "100 MiB are free: it does not fit" in capsys.readouterr().err


def test_a_causal_model_is_asked_by_the_rules_of_fit(gpu: dict[str, int], tmp_path: Path) -> None:
    callback = trainer_callbacks.MemoryCheckCallback()
    model = causal_model()
    trainer(tmp_path, model, callback, activation_checkpointing=True, bf16=True).train()
    answer = callback.answer
    assert answer.depth == "instant"
    assert answer.trained_parameters == sum(each.numel() for each in model.parameters())
    method = answer.method
    assert (method.batch_size, method.sequence_length) == (BATCH, TOKENS)
    assert (method.method, method.precision, method.checkpointing) == ("full", "amp_bf16", True)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_are_seen(gpu: dict[str, int], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal_model().to(torch.bfloat16), config)
    callback = trainer_callbacks.MemoryCheckCallback(sequence_length=64)
    trainer(tmp_path, model, callback).train()
    method = callback.answer.method
    assert (method.method, method.lora_rank, method.lora_target) == ("lora", 4, "q_proj,v_proj")
    assert method.sequence_length == 64
    assert callback.answer.trained_parameters == model.get_nb_trainable_parameters()[0]


def test_frozen_layers_are_traced(gpu: dict[str, int], tmp_path: Path) -> None:
    """The rules of ``fit`` know no frozen layers: they would count other parameters."""
    model = causal_model()
    model.model.layers[0].requires_grad_(False)
    callback = trainer_callbacks.MemoryCheckCallback()
    trainer(tmp_path, model, callback).train()
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert 8 * trained <= callback.answer.parts["optimizer_state"] < 9 * trained


def test_what_was_used_is_an_observation(gpu: dict[str, int], tmp_path: Path) -> None:
    observations = tmp_path / "observations.jsonl"
    callback = trainer_callbacks.MemoryCheckCallback(observations=observations)
    model = classifier()
    weights = model.bert.pooler.dense.weight
    trainer(tmp_path, model, callback, optim="sgd").train()
    assert not weights.is_meta
    assert callback.answer.batch_size == BATCH
    [line] = map(json.loads, observations.read_text("utf-8").splitlines())
    assert line["peak_bytes"] == 700 * MIB
    assert line["job"]["optimizer"] == "sgd"
    [table] = [read_site_rows([observations])]
    assert len(table.jobs) == 1


def test_without_a_gpu_it_only_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = trainer_callbacks.MemoryCheckCallback(gpu="T4", observations=tmp_path / "none")
    trainer(tmp_path, classifier(), callback).train()
    assert "on Tesla T4" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_unknown_gpu_never_stops_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tmp_path, classifier(), trainer_callbacks.MemoryCheckCallback(gpu="A1"))
    run.train()
    assert run.state.global_step == 2
    assert "not checked" in capsys.readouterr().err


def test_misfit_is_stop_or_warn() -> None:
    with pytest.raises(InvalidRequestError, match="stop, warn"):
        trainer_callbacks.MemoryCheckCallback("explode")


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("free", [40 * GIB, 100 * MIB])
def test_lightning(gpu: dict[str, int], tmp_path: Path, free: int) -> None:
    lightning = pytest.importorskip(
        "lightning.pytorch", reason="Lightning is not installed", exc_type=ImportError
    )

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(16, 4)

        def training_step(self, batch: Any, number: int) -> Any:
            inputs, targets = batch
            loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    gpu["available_bytes"] = free
    observations = tmp_path / "observations.jsonl"
    callback = trainer_callbacks.LightningMemoryCheck(observations=observations)
    run = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    data = torch.utils.data.TensorDataset(torch.randn(6, 16), torch.randn(6, 4))
    batches = torch.utils.data.DataLoader(data, batch_size=BATCH)
    if free < GIB:
        with pytest.raises(JobDoesNotFitError):
            run.fit(Module(), batches)
        assert run.global_step == 0
        return
    run.fit(Module(), batches)
    assert run.callback_metrics["loss"].device.type == "cpu"
    job = json.loads(observations.read_text("utf-8"))["job"]
    assert (job["batch_size"], job["optimizer"]) == (BATCH, "sgd_momentum")
