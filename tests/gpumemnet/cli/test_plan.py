"""``gpumemnet plan`` as people and programs call it."""

import io
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gpumemnet.cli import main
from gpumemnet.cli.plan import show_plan
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.planner import applied, load_plan
from gpumemnet.planner.plan_choice import plan_request
from gpumemnet.planner.plans import PlanAnswer, PlanRequest, plan_answer_from_dict
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


def test_a_job_that_does_not_fit_gets_a_plan(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    options = [
        "--budget",
        "0.85GiB",
        "--no-alternatives",
        "--json",
        "--out",
        str(out),
    ]
    assert main(["plan", *BLOCKS, *options]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    document = json.loads(shown.out)
    assert set(document) == {
        "outcome",
        "budget_bytes",
        "before",
        "plan",
        "after",
        "reason",
        "alternatives",
    }
    answer = plan_answer_from_dict(document)
    assert answer.outcome == "planned"
    assert answer.plan is not None
    assert answer.after is not None
    assert answer.after.safe_bytes <= answer.budget_bytes < answer.before.safe_bytes
    assert answer.after.expected_bytes == pytest.approx(answer.plan.process_bytes, rel=0.01)
    assert set(answer.plan.decisions) <= set(answer.plan.units)
    assert answer.plan.slowdown > 0

    model = blocks.build()
    assert load_plan(out) == answer.plan
    with applied(model, out):
        model(torch.ones(2, 64, 256)).sum().backward()

    console = Console(record=True, width=120, file=io.StringIO())
    show_plan(answer, ("adamw", "fp32"), console)
    text = console.export_text()
    for words in ("Does not fit", "A plan fits", "recompute  blocks.", "modelled", "greedy"):
        assert words in text


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is planned here, without a process of its own, which takes seconds."""

    def plan_file(source: str, request: PlanRequest, **options: object) -> PlanAnswer:
        return plan_request(
            blocks.build(), inputs_from_example(torch.empty(64, 64, 256), None), request
        )

    monkeypatch.setattr("gpumemnet.cli.plan.plan_file", plan_file)


@pytest.mark.usefixtures("in_this_process")
def test_a_job_that_fits_needs_no_plan(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        main(
            [
                "plan",
                *BLOCKS,
                "--plot",
                str(tmp_path / "plan.svg"),
                "--out",
                str(tmp_path / "plan.json"),
            ]
        )
        == 0
    )
    shown = capfd.readouterr()
    assert shown.out.startswith("Fits as it is: ")
    assert shown.err == "there is no plan to write\n"
    assert "<svg" in (tmp_path / "plan.svg").read_text()


@pytest.mark.usefixtures("in_this_process")
def test_where_no_plan_fits_the_reason_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BLOCKS, "--budget", "700 MiB", "--no-alternatives"]) == 1
    shown = capfd.readouterr()
    assert shown.err == ""
    assert "No plan fits: for safe bytes of 700 MiB, " in shown.out
    assert "instead of a plan" not in shown.out


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_a_model_is_planned_by_its_name(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "vocab_size": 2000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    training = ["--method", "lora", "--sequence-length", "2048", "--batch-size", "4"]
    options = ["--gpu", "RTX-4090", "--budget", "1800MiB", "--no-alternatives", "--json"]
    assert main(["plan", str(tmp_path), *training, *options]) == 0
    answer = plan_answer_from_dict(json.loads(capfd.readouterr().out))
    assert answer.plan is not None
    assert set(answer.plan.units) == {f"base_model.model.model.layers.{n}" for n in range(6)}
    assert answer.plan.decisions
