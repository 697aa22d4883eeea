"""``gpumemnet plan`` as people and programs call it."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumemnet.cli import main
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.planner import load_plan
from gpumemnet.planner.plan_choice import plan_request
from gpumemnet.planner.plans import PlanAnswer, PlanRequest
from gpumemnet.torch_private.names import declare_torchvision_operators
from tests.gpumemnet.planner.examples import blocks

BLOCKS = [
    f"{Path(blocks.__file__)}:build",
    "--batch-size",
    "64",
    "--input",
    "64x256",
    "--gpu",
    "RTX-4090",
]


def printed(shown: str) -> str:
    """The lines of Python in ``shown``."""
    lines = shown[shown.index("from gpumemnet") :].partition("\nnote: ")[0]
    assert max(map(len, lines.splitlines())) <= 80
    return lines


def pasted(shown: str, script: str) -> dict[str, Any]:
    """What ``script`` leaves, with the lines of Python in ``shown`` in the place of a comment."""
    made: dict[str, Any] = {}
    exec(script.replace("# the plan", printed(shown)), made)
    return made


LOOP = """
import torch
from tests.gpumemnet.planner.examples import blocks

torch.manual_seed(0)
model = blocks.build()
# the plan
loss = model(torch.randn(2, 64, 256)).square().mean()
loss.backward()
gradients = [each.grad for each in model.parameters()]
"""


def test_the_lines_of_a_plan_train_alike(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    options = ["--budget", "0.85GiB", "--no-alternatives", "--out", str(out)]
    assert main(["plan", *BLOCKS, *options]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    for words in ("Does not fit", "A plan fits", "recompute  blocks.", "modelled", "greedy"):
        assert words in shown.out
    plain, planned = pasted("from gpumemnet import trace", LOOP), pasted(shown.out, LOOP)
    plan = load_plan(out)
    assert planned["plan"] == {unit: plan.decision(unit) for unit in plan.units}
    assert plan.slowdown > 0
    assert torch.equal(planned["loss"], plain["loss"])
    assert all(map(torch.equal, planned["gradients"], plain["gradients"]))


SCRIPT = f"""{Path(blocks.__file__).read_text("utf-8")}
import sys
import torch

model = build().to("cuda")
# the plan
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(int(sys.argv[1])):
    loss = model(torch.randn(64, 64, 256).to("cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_with_the_lines_of_its_plan_takes_what_they_say(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT, "utf-8")
    line = ["--gpu", "RTX-4090", "--", "python", str(script), "3"]
    options = ["--budget", "0.85GiB", "--no-alternatives", "--out", str(out)]
    assert main(["plan", *options, *line]) == 0
    shown = capfd.readouterr().out
    for words in ("Blocks, batch size 64", "trains it: Blocks, SGD, fp32;"):
        assert words in shown
    script.write_text(SCRIPT.replace("# the plan", printed(shown)), "utf-8")
    assert main(["trace", "--json", *line]) == 0
    traced = json.loads(capfd.readouterr().out)
    assert traced["expected_bytes"] == pytest.approx(load_plan(out).process_bytes, rel=0.01)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is planned here, without a process of its own, which takes seconds."""

    def plan_file(factory: object, request: PlanRequest, **options: object) -> PlanAnswer:
        return plan_request(
            blocks.build(), inputs_from_example(torch.empty(64, 64, 256), None), request
        )

    monkeypatch.setattr("gpumemnet.cli.plan.plan_file", plan_file)


@pytest.mark.usefixtures("in_this_process")
def test_a_job_that_fits_needs_no_plan(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", *BLOCKS, "--out", str(tmp_path / "plan.json")]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("Fits NVIDIA GeForce RTX 4090: ")
    assert shown.err == "there is no plan to write\n"


@pytest.mark.usefixtures("in_this_process")
def test_where_no_plan_fits_the_reason_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BLOCKS, "--budget", "700 MiB", "--no-alternatives"]) == 1
    shown = capfd.readouterr()
    assert shown.err == ""
    assert "No plan fits: for safe bytes of 700 MiB, " in shown.out
    assert "instead of a plan" not in shown.out


TRAINER = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny"))
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
samples = [{"input_ids": x, "labels": x} for x in torch.randint(0, 1000, (4, 32))]
arguments = TrainingArguments(
    "out", use_cpu=True, max_steps=2, per_device_train_batch_size=2, logging_steps=1,
    save_strategy="no", report_to=[], gradient_checkpointing=True,
)
trainer = Trainer(model, arguments, train_dataset=samples)
# the plan
trainer.train()
losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
weights = list(model.state_dict().values())
"""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_fit_leads_to_lines_with_which_the_trainer_trains_alike(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    }
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config), "utf-8")
    training = ["--method", "lora", "--sequence-length", "2048", "--batch-size", "64"]
    assert main(["fit", "./tiny", *training, "--no-checkpointing", "--gpu", "RTX-3060"]) == 3
    command = re.search("gpumemnet (plan .*)", capfd.readouterr().out)
    assert command is not None
    assert main([*shlex.split(command[1]), "--budget", "8GiB", "--no-alternatives"]) == 0
    shown = capfd.readouterr().out
    assert "base_model.model.model.layers." in shown
    declare_torchvision_operators()  # without them transformers cannot be imported
    plain, planned = pasted("from gpumemnet import trace", TRAINER), pasted(shown, TRAINER)
    assert planned["losses"] == plain["losses"]
    assert all(map(torch.equal, planned["weights"], plain["weights"]))
