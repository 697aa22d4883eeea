"""Runs the checks that take too long for every change, and reports failures.

    python benchmarks/nightly.py [--only NAME ...] [--list]

Each step is a command of its own whose output goes to ``nightly/STEP.log``.  Steps run one after the
other, as most of them measure time, and all of them run even if one fails.  Prints a table and ends
with 1 when a step failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
OUT = ROOT / "nightly"


@dataclass(frozen=True, slots=True)
class Step:
    """One command.

    Attributes:
        arguments: arguments of the Python interpreter.
        what: what the command checks or measures.
        environment: variables to add to the environment of this process.
    """

    name: str
    arguments: tuple[str, ...]
    what: str
    environment: Mapping[str, str] = field(default_factory=dict)


MEASURED_MODELS = OUT / "measured_models"
MEASURED_VERSIONS = ("timm==1.0.9", "transformers==4.51.3", "tokenizers<0.22", "huggingface_hub<1")
MAKE_MEASURED_MODELS = f"""
import subprocess, sys
pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", {str(MEASURED_MODELS)!r}]
subprocess.run([*pip, *{MEASURED_VERSIONS!r}], check=True)
"""

STEPS = (
    Step(
        "properties",
        ("-m", "pytest", "-m", "", "-n", "2", "--dist", "loadfile", "--examples", "10"),
        "all tests, those that only this run takes too, with ten times the examples of each property",
        {"GPUMEMNET_FUZZ_CASES": "500"},
    ),
    Step(
        "schemathesis",
        ("-m", "pytest", "-s", "tests/service/api/test_schemathesis.py"),
        "more than 10,000 cases of the API's description in all",
        {"GPUMEMNET_SCHEMATHESIS_CASES": "400"},
    ),
    Step(
        "documents",
        ("-m", "pytest", "-m", "", "tests/docs"),
        "the figures in the documents, including those whose commands take minutes",
    ),
    Step(
        "chaos",
        ("benchmarks/chaos.py", "--seconds", "1800"),
        "half an hour of load while models and workers change",
    ),
    Step(
        "evaluate",
        ("-m", "gpumemnet", "evaluate"),
        "both encoders, the line and boosted trees on held-out families",
    ),
    Step(
        "learning_loop",
        ("benchmarks/learning_loop.py",),
        "from observation to a new model in service",
    ),
    Step(
        "retrain_gate",
        ("benchmarks/retrain_gate.py", "--out", "nightly/retrain_gate.jsonl"),
        "the gate of retraining",
    ),
    Step(
        "site_calibration", ("benchmarks/site_calibration.py",), "calibration to a site (2 minutes)"
    ),
    Step("in_process", ("benchmarks/in_process.py",), "cost of a prediction"),
    Step("http_latency", ("benchmarks/http_latency.py",), "cost of a request"),
    Step(
        "batch",
        ("benchmarks/batch.py", "--rows", "2000000", "--layered-rows", "100000"),
        "files of jobs",
    ),
    Step("allocator", ("benchmarks/allocator.py",), "the simulated allocator"),
    Step("trace", ("benchmarks/trace.py",), "cost of a trace"),
    Step("real_models", ("benchmarks/real_models.py",), "traces against published readings"),
    Step(
        "limits",
        ("benchmarks/limits.py", "--work", "nightly/limits", "--trace"),
        "ordinary networks: limits against traces",
    ),
    Step(
        "monotone",
        ("benchmarks/monotone.py",),
        "steps of the batch size at which request or limit fall",
    ),
    Step("real_runs", ("benchmarks/real_runs.py",), "traced parts against published runs"),
    Step(
        "measured_models",
        ("-c", MAKE_MEASURED_MODELS),
        "the measured versions of model libraries, for the next step",
    ),
    Step(
        "scoreboard",
        (
            "-m",
            "research",
            "scoreboard",
            "--out",
            "docs/evaluation/scoreboard",
            "--cpu-budget",
            "3600",
        ),
        "published estimators on published runs, with an hour more of runs on the CPU",
        {"PYTHONPATH": str(MEASURED_MODELS)},
    ),
    Step(
        "real_scripts",
        (
            "benchmarks/real_scripts.py",
            "--checkouts",
            "nightly/checkouts",
            "--out",
            "nightly/real_scripts.jsonl",
            "--again",
        ),
        "training scripts of others, from clones in nightly/checkouts, and of our own",
    ),
    Step(
        "plan_optimizers",
        ("benchmarks/plan_optimizers.py",),
        "six networks: the planner's optimizers against the optimum",
    ),
    Step(
        "plan_table",
        ("benchmarks/plan_table.py",),
        "twelve models planned for 70 % of their peak, and each plan traced",
    ),
    Step("replicas", ("benchmarks/replicas.py",), "predicted against traced replicas"),
)


def run(step: Step) -> tuple[int, float]:
    """Run a step; return its exit status and its seconds."""
    started = time.monotonic()
    with (OUT / f"{step.name}.log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, *step.arguments],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **step.environment},
            check=False,
        )
    return done.returncode, time.monotonic() - started


def table(results: Mapping[str, tuple[int, float]], steps: tuple[Step, ...]) -> Table:
    """Return a table of the steps with what each checks and, if it has run, its result."""
    result_table = Table("step", "what", "minutes", "outcome")
    for step in steps:
        status, seconds = results.get(step.name, (None, 0.0))
        outcome = {None: "", 0: "passed"}.get(
            status, f"failed ({status}): see nightly/{step.name}.log"
        )
        result_table.add_row(
            step.name, step.what, "" if status is None else f"{seconds / 60:.1f}", outcome
        )
    return result_table


def main() -> int:
    """Run the selected steps; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[step.name for step in STEPS],
        metavar="NAME",
        help="run only these steps",
    )
    parser.add_argument("--list", action="store_true", help="show the steps and run none")
    arguments = parser.parse_args()
    steps = tuple(step for step in STEPS if not arguments.only or step.name in arguments.only)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if arguments.list:
        console.print(table({}, steps))
        return 0
    OUT.mkdir(exist_ok=True)
    results: dict[str, tuple[int, float]] = {}
    for step in steps:
        console.print(f"{step.name}: {step.what}")
        results[step.name] = run(step)
    console.print(table(results, steps))
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
