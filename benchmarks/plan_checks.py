"""Checks planned peaks without a GPU: the plan's own, a trace of the model with the plan applied,
and PyTorch's CUDA code.

    python benchmarks/plan_checks.py [--networks ResNet-50 …] [--shares 0.5 …] [--decisions swap …]
    [--cuda PYTHON]

Each of the six networks of ``planner_networks.py`` is planned for shares of the memory that it
takes without a plan, or all its units take one decision.  The program compares the reserved bytes
that the plan states with those of a trace under :func:`gpumemnet.planner.applied`, and with those
of the same step on the null GPU (``tests/dataset_builder/measure/null_gpu``).  ``PYTHON`` is one
with a CUDA build of PyTorch, torchvision, timm and transformers; without it that column stays
empty.  Convolutions take no workspaces on any side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402

with suppress(
    Exception
):  # before planner_networks: that defines operators of a torchvision that cannot define its own
    import torchvision  # noqa: F401
from cuda_code import PEAKS, Peaks, peaks_of, without_cudnn  # noqa: E402
from planner_networks import PLANNER_NETWORKS  # noqa: E402
from real_jobs_cuda_code import _like, _move  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import gpumemnet  # noqa: E402
from gpumemnet.errors import BudgetError  # noqa: E402
from gpumemnet.extract.module_calls import ModelInputs, inputs_from_example  # noqa: E402
from gpumemnet.gpu import device_profile  # noqa: E402
from gpumemnet.physics.element_types import AUTOCAST_TYPES  # noqa: E402
from gpumemnet.physics.optimizers import torch_call  # noqa: E402
from gpumemnet.planner import Decision, applied  # noqa: E402
from gpumemnet.planner.costs import find_machine  # noqa: E402
from gpumemnet.planner.plan_choice import choose_plan  # noqa: E402
from gpumemnet.planner.planned_step import simulate  # noqa: E402
from gpumemnet.planner.step_units import split_step  # noqa: E402
from gpumemnet.tracing.api import TraceOptions, checked_request  # noqa: E402
from gpumemnet.tracing.losses_and_optimizers import loss_function  # noqa: E402
from gpumemnet.tracing.operators.rules import Platform  # noqa: E402
from gpumemnet.units import GIB  # noqa: E402

GPU = "H200"
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="*", default=list(PLANNER_NETWORKS), help="names of planner_networks.py"
    )
    parser.add_argument(
        "--shares", nargs="*", type=float, default=[0.9, 0.7, 0.5, 0.3], help="budgets to plan for"
    )
    parser.add_argument("--decisions", nargs="*", default=[], help="decisions that all units take")
    parser.add_argument(
        "--cuda", type=Path, help="Python with a CUDA build of PyTorch, for the null GPU"
    )
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        warnings.filterwarnings("ignore")
        print(json.dumps(run_job(**json.load(sys.stdin))))
        return
    print(
        "| network | plan | units | planned GiB | traced GiB | error | null GPU GiB | error of the plan | of the trace |"
    )
    print("|---|---|---|--:|--:|--:|--:|--:|--:|")
    for name in arguments.networks:
        for words, decisions, planned in plans(name, arguments.shares, arguments.decisions):
            found = traced(name, decisions)[2]
            cells = [
                name,
                words,
                summary(decisions),
                f"{planned / GIB:.2f}",
                f"{found / GIB:.2f}",
                f"{planned / found - 1:+.2%}",
            ]
            if arguments.cuda:
                real = on_null_gpu(arguments.cuda, name, decisions)[2]
                cells += [
                    f"{real / GIB:.2f}",
                    f"{planned / real - 1:+.2%}",
                    f"{found / real - 1:+.2%}",
                ]
            print(f"| {' | '.join([*cells, *[''] * (9 - len(cells))])} |", flush=True)


def plans(
    name: str, shares: list[float], decisions: list[str]
) -> Iterator[tuple[str, dict[str, str], int]]:
    """Yield each plan's name, its decisions and the reserved bytes that it states."""
    model, inputs = build(name)
    options = options_of(name)
    device = device_profile(GPU)
    with without_cudnn():
        step = split_step(model, inputs, checked_request(options, device))
    machine = find_machine(GPU)
    keep = simulate(step, machine, {})
    yield "nothing", {}, keep.peak_reserved_bytes
    for decision in decisions:
        every = dict.fromkeys(step.units, Decision(decision))
        yield (
            f"all {decision}",
            {name: str(each) for name, each in every.items()},
            simulate(step, machine, every).peak_reserved_bytes,
        )
    for share in shares:
        try:
            plan = choose_plan(step, machine, round(share * keep.process_bytes))
        except BudgetError as error:
            print(f"{name}, {share:.0%}: {error}", file=sys.stderr)
            continue
        yield (
            f"{share:.0%}",
            {unit: str(plan.decision(unit)) for unit in plan.units},
            plan.peak_reserved_bytes,
        )


def summary(decisions: dict[str, str]) -> str:
    """Return how many units take each decision."""
    return ", ".join(
        f"{count} {decision}"
        for decision, count in Counter(decisions.values()).items()
        if decision != "keep"
    )


def build(name: str) -> tuple[nn.Module, ModelInputs]:
    """Return a network without memory for its weights, and its inputs."""
    network = PLANNER_NETWORKS[name]
    with gpumemnet.large_tensors_on_meta():
        model, inputs = network.make(network.batch_size)
    return model, inputs_from_example(inputs, network.batch_size)


def options_of(name: str) -> TraceOptions:
    """Return how a network is trained."""
    network = PLANNER_NETWORKS[name]
    return TraceOptions(optimizer=network.optimizer, precision=network.precision)


def traced(name: str, plan: dict[str, str]) -> Peaks:
    """Return the peaks of requested, allocated and reserved bytes of a trace with the plan
    applied."""
    model, inputs = build(name)
    options = options_of(name)
    with applied(model, plan):
        return peaks_of(model, inputs, options, Platform.of(device_profile(GPU), options))


def on_null_gpu(python: Path, name: str, plan: dict[str, str]) -> Peaks:
    """Return the same peaks of PyTorch's own CUDA code."""
    with tempfile.TemporaryDirectory() as folder:
        module = "tests.dataset_builder.measure.null_gpu.build"
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        statement = f"from pathlib import Path; import {module} as null; p = Path({folder!r}); null.build(p)"
        command = [
            python,
            "-c",
            f"{statement}; import json; print(json.dumps(null.environment(p)))",
        ]
        listed = subprocess.run(
            command, env=paths, capture_output=True, text=True, check=True
        ).stdout
        done = subprocess.run(
            [python, __file__, "--run"],
            env=paths | json.loads(listed.splitlines()[-1]),
            input=json.dumps({"name": name, "plan": plan}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.stderr)
        requested, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
        return requested, allocated, reserved


def run_job(name: str, plan: dict[str, str]) -> Peaks:
    """Train for a few steps on the GPU as the trace's loop does, with the plan applied; return the
    peaks."""
    model, inputs = build(name)
    options = options_of(name)
    moved: dict[int, Tensor] = {}
    _move(model, options, moved)
    model.train()
    class_name, arguments = torch_call(options.optimizer, options.optimizer_implementation)
    optimizer = getattr(torch.optim, class_name)(
        [p for p in model.parameters() if p.requires_grad], **arguments
    )
    loss = loss_function("auto")
    shapes: list[tuple[Any, Any]] = []
    autocast = AUTOCAST_TYPES.get(options.precision)
    with applied(model, plan):
        for _ in range(STEPS):
            _step(model, inputs, options, optimizer, loss, shapes, autocast)
    statistics = torch.cuda.memory_stats()
    requested, allocated, reserved = (int(statistics[f"{peak}_bytes.all.peak"]) for peak in PEAKS)
    return requested, allocated, reserved


def _step(
    model: nn.Module,
    inputs: ModelInputs,
    options: TraceOptions,
    optimizer: torch.optim.Optimizer,
    loss_of: Any,
    shapes: list[tuple[Any, Any]],
    autocast: str | None,
) -> None:
    optimizer.zero_grad(set_to_none=True)
    batch = inputs.mapped(lambda tensor: _like(tensor, options))
    targets = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
    left = list(targets)

    def target(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if left:
            return left.pop(0)
        dtype = torch.float32 if dtype.is_floating_point and autocast else dtype
        shapes.append((shape, dtype))
        targets.append(torch.empty(shape, dtype=dtype, device="cuda"))
        return targets[-1]

    with torch.autocast(
        "cuda", dtype=getattr(torch, autocast or "bfloat16"), enabled=autocast is not None
    ):
        output = model(*batch.args, **batch.kwargs)
        loss = loss_of(output, target)
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    main()
