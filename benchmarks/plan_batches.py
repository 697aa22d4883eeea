"""The largest batch on cards of 16, 24 and 80 GB, with a plan and without, and the slow-down at
half of the peak.

    python benchmarks/plan_batches.py [--network NAME ...] [--card CARD ...] [--out FILE.json]

The six networks of :mod:`benchmarks.planner_networks` are traced as on an A100.  The budgets are
what one process can use on an RTX 4080, an RTX 4090 and an A100 of 80 GB.  A batch fits if its safe
bytes do, with a plan and without.  All times are modelled. The batch with a plan is searched in
steps of at most 10 %.  One network takes a few minutes; there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpumemnet
from benchmarks.ordinary_networks import Network
from benchmarks.planner_networks import PLANNER_NETWORKS
from gpumemnet.errors import PlanError
from gpumemnet.extract.module_calls import ModelInputs, inputs_from_example
from gpumemnet.gpu import available_mib, find_profile, with_available
from gpumemnet.planner.costs import StepCosts, find_machine
from gpumemnet.planner.plan_choice import choose_plan, expected_budget
from gpumemnet.planner.plans import Plan
from gpumemnet.planner.step_units import split_step
from gpumemnet.tracing.api import ExtraResults, TraceOptions, checked_request, trace_request
from gpumemnet.tracing.timeline import steady_memory
from gpumemnet.units import MIB

TRACED_AS: Final = "A100-80GB"
CARDS: Final = {"16 GB": "RTX-4080", "24 GB": "RTX-4090", "80 GB": "A100-80GB"}
_STEP: Final = 1.1
_MOST_DOUBLINGS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One network on one card.

    Attributes:
        network, card: their names.
        batch_size: the largest batch without a plan, 0 if none fits.
        planned_batch_size: the largest batch with a plan.
        slowdown: modelled slow-down of that plan, for each sample.
    """

    network: str
    card: str
    batch_size: int
    planned_batch_size: int
    slowdown: float | None


def largest(fits: Callable[[int], bool], smallest: int) -> int:
    """Return a batch size that fits, at least ``smallest`` and within :data:`_STEP` of one that
    does not; 0 if none does."""
    low, high = smallest, max(1, 2 * smallest)
    for _ in range(_MOST_DOUBLINGS):
        if not fits(high):
            break
        low, high = high, 2 * high
    while high - low > 1 and high > _STEP * low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Job:
    """One network, traced at the batch sizes that are asked for, as on :data:`TRACED_AS`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        with gpumemnet.large_tensors_on_meta():
            self._model, self._inputs = network.make(network.batch_size)
        self._device = find_profile(TRACED_AS)
        self._options = TraceOptions(optimizer=network.optimizer, precision=network.precision)
        self.machine = find_machine(TRACED_AS)
        self.step = cache(self._step)

    def _step(self, batch_size: int) -> StepCosts:
        return split_step(
            self._model, self._at(batch_size), checked_request(self._options, self._device)
        )

    def _budget(self, batch_size: int, available_bytes: int) -> int:
        timeline = self.step(batch_size).timeline
        memory = steady_memory(timeline, with_available(self._device, available_bytes))
        return expected_budget(available_bytes, memory.expected_bytes, memory.safe_bytes)

    def _at(self, batch_size: int) -> ModelInputs:
        return inputs_from_example(self._inputs, None).resized(batch_size)

    def largest_batch(self, available_bytes: int) -> int:
        """Return the largest batch that fits without a plan."""
        request = checked_request(
            self._options,
            with_available(self._device, available_bytes),
            extras=ExtraResults(max_batch=True),
        )
        found = trace_request(
            self._model, self._at(self.network.batch_size), request
        ).max_batch_size
        assert found is not None
        return found

    def plan(self, batch_size: int, available_bytes: int) -> Plan | None:
        """Return the plan of the greedy search whose safe bytes fit, ``None`` if there is none."""
        target = self._budget(batch_size, available_bytes)
        try:
            return choose_plan(self.step(batch_size), self.machine, target) if target > 0 else None
        except PlanError:
            return None


def row(job: Job, card: str) -> Row:
    """Compute one row."""
    available_bytes = available_mib(find_profile(CARDS[card])) * MIB
    batch_size = job.largest_batch(available_bytes)
    planned = largest(lambda size: job.plan(size, available_bytes) is not None, batch_size)
    plan = job.plan(planned, available_bytes) if planned > batch_size else None
    return Row(
        network=job.network.name,
        card=card,
        batch_size=batch_size,
        planned_batch_size=planned,
        slowdown=None if plan is None else plan.slowdown,
    )


def half(job: Job) -> float | None:
    """Return the modelled slow-down of the usual batch at half of its peak; ``None`` if no plan
    gets there."""
    step = job.step(job.network.batch_size)
    most = choose_plan(step, job.machine, 2**50).process_bytes
    try:
        return choose_plan(step, job.machine, most // 2).slowdown
    except PlanError:
        return None


def main() -> None:
    """Compute the rows, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--network",
        action="append",
        choices=list(PLANNER_NETWORKS),
        help="only these; all by default",
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON too")
    parser.add_argument(
        "--card", action="append", choices=list(CARDS), help="only these; all by default"
    )
    arguments = parser.parse_args()
    cards = arguments.card or list(CARDS)
    header = " | ".join(f"{card}: batch, with a plan, longer step" for card in cards)
    print(f"| network | usual batch | half of its peak | {header} |")
    print("|---|---:|---:|" + "---:|" * len(cards))
    rows: list[dict[str, Any]] = []
    for name in arguments.network or PLANNER_NETWORKS:
        started = time.perf_counter()
        job = Job(PLANNER_NETWORKS[name])
        share = half(job)
        found = [row(job, card) for card in cards]
        cells = " | ".join(_cell(each) for each in found)
        print(f"| {name} | {job.network.batch_size} | {_percent(share)} | {cells} |", flush=True)
        print(f"{name}: {time.perf_counter() - started:,.0f} s", file=sys.stderr)
        rows += [{**asdict(each), "half_peak_slowdown": share} for each in found]
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def _cell(each: Row) -> str:
    if each.planned_batch_size == each.batch_size:
        return f"{each.batch_size}" if each.batch_size else "none"
    return f"{each.batch_size} → {each.planned_batch_size}, {_percent(each.slowdown)}"


def _percent(share: float | None) -> str:
    return "not reached" if share is None else f"{100 * share:+.1f} %"


if __name__ == "__main__":
    main()
