"""Compares the planner's searches, and published rules, on seven networks: slow-down in four budgets, distance to the
optimum, seconds to plan.

    python benchmarks/plan_optimizers.py [--network NAME ...] [--optimizer NAME ...] [--gpu A100-80GB]

A budget is a share of the memory that the process takes if everything is kept; every plan is
checked through the simulated allocator.  The distance is computed before that check: on the same
linear costs and limits, the slow-down beyond the bound that the exact programme proves, in points,
the largest of the four limits.  Seconds are those of the processor and those of the clock, each for
its slowest budget; the second ones are longer where other programs run, too.
Nothing runs on a GPU: all times of steps are modelled.  Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planner_networks import MANY_UNITS, PLANNER_NETWORKS
from gpumemnet.errors import PlanError
from gpumemnet.extract.placement import large_tensors_on_meta
from gpumemnet.planner.chain import Chain, chain_of
from gpumemnet.planner.costs import Machine, StepCosts, find_machine
from gpumemnet.planner.plan_choice import choose_plan
from gpumemnet.planner.planned_step import decisions_of, simulate
from gpumemnet.planner.plans import PLANNERS
from gpumemnet.planner.searches import exact, greedy
from gpumemnet.planner.step_units import split_step
from gpumemnet.tracing.api import TraceOptions, checked_request
from gpumemnet.units import GIB
from research.planner_references import FIXED, REFERENCES, swarm

SHARES = (0.9, 0.7, 0.5, 0.3)
SEARCHES = {"greedy": greedy, "exact": exact, "swarm": swarm, **REFERENCES}
NETWORKS = {**PLANNER_NETWORKS, MANY_UNITS.name: MANY_UNITS}


def optima(chain: Chain) -> dict[float, float]:
    """Limit on live bytes → the smallest seconds of a step within it, for each share that can be
    reached."""
    peak = float(chain.peak_bytes(chain.keep_all()[None])[0])
    found: dict[float, float] = {}
    for limit in (share * peak for share in SHARES):
        quick = greedy(chain, limit)
        known = (
            np.inf if quick.choices is None else float(chain.step_seconds(quick.choices[None])[0])
        )
        best = exact(chain, limit, known_seconds=known)
        if best.choices is not None and best.bound_seconds is not None:
            found[limit] = best.bound_seconds
    return found


def distance(chain: Chain, name: str, smallest: dict[float, float]) -> str:
    """The largest distance of one optimizer to the optimum, in points; ``-`` where it finds
    nothing."""
    if name == "exact":
        return "0"
    keep = float(chain.step_seconds(chain.keep_all()[None])[0])
    points, missing = [], 0
    for limit, seconds in smallest.items():
        choices = SEARCHES[name](chain, limit).choices
        if choices is None:
            missing += 1
        else:
            points.append(
                100 * max(float(chain.step_seconds(choices[None])[0]) - seconds, 0.0) / keep
            )
    text = f"{max(points):.2f}" if points else "-"
    return f"{text} ({missing} of {len(smallest)} not found)" if missing and points else text


def slowdown(
    step: StepCosts, machine: Machine, budget_bytes: int, optimizer: str, chain: Chain
) -> float:
    """The modelled slow-down of the plan of one optimizer within a budget."""
    if optimizer in FIXED:  # their one plan fits or not
        choices = SEARCHES[optimizer](chain, np.inf).choices
        planned = None if choices is None else simulate(step, machine, decisions_of(step, choices))
        if planned is None or planned.process_bytes > budget_bytes:
            raise PlanError(f"the plan of '{optimizer}' does not fit")
        return planned.step_seconds / simulate(step, machine, {}).step_seconds - 1
    search = SEARCHES[optimizer]
    is_product = optimizer in PLANNERS
    plan = choose_plan(
        step,
        machine,
        budget_bytes,
        optimizer,
        chain=chain,
        search=None if is_product else lambda chain, limit, seconds: search(chain, limit),
        is_refined=is_product or optimizer == "swarm",
    )
    return plan.slowdown


def rows(name: str, optimizers: Iterable[str], gpu: str) -> Iterable[str]:
    """The rows of one network."""
    network = NETWORKS[name]
    with large_tensors_on_meta():
        model, inputs = network.make(network.batch_size)
    options = TraceOptions(precision=network.precision, optimizer=network.optimizer)
    step = split_step(model, inputs, checked_request(options, gpu))
    machine = find_machine(gpu)
    chain = chain_of(step, machine)
    keep = simulate(step, machine, {}, chain=chain)
    title = f"{name}, batch {network.batch_size}, {len(step.units)} units, {keep.process_bytes / GIB:.1f} GiB"
    smallest = optima(chain)
    for optimizer in optimizers:
        cells, processor_seconds, clock_seconds = [], 0.0, 0.0
        for share in SHARES:
            processor_started, clock_started = time.process_time(), time.perf_counter()
            try:
                cells.append(
                    f"{slowdown(step, machine, int(share * keep.process_bytes), optimizer, chain):.1%}"
                )
            except PlanError:
                cells.append("-")
            processor_seconds = max(processor_seconds, time.process_time() - processor_started)
            clock_seconds = max(clock_seconds, time.perf_counter() - clock_started)
        shown = f"**{optimizer}**" if optimizer in PLANNERS else optimizer
        points = distance(chain, optimizer, smallest)
        yield f"| {title} | {shown} | {' | '.join(cells)} | {points} | {processor_seconds:.1f} | {clock_seconds:.1f} |"
        title = ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--network", action="append", choices=list(NETWORKS), help="only these; all by default"
    )
    parser.add_argument(
        "--optimizer", action="append", choices=list(SEARCHES), help="only these; all by default"
    )
    parser.add_argument("--gpu", default="A100-80GB", help="GPU of the catalogue")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(
        f"| network | optimizer | {' | '.join(f'{share:.0%}' for share in SHARES)} | points to optimum | CPU s | s |"
    )
    print("|---|---|" + "---:|" * (len(SHARES) + 3))
    for name in arguments.network or NETWORKS:
        for row in rows(name, arguments.optimizer or SEARCHES, arguments.gpu):
            print(row, flush=True)


if __name__ == "__main__":
    main()
