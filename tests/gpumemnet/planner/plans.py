"""A plan with figures that are easy to compute with, for tests of what is made of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumemnet.planner.plans import Decision, Plan
from gpumemnet.units import MIB


def a_plan(units: tuple[str, ...], decisions: Mapping[str, str], **figures: Any) -> Plan:
    """A plan with ``decisions`` by unit; ``figures`` replace its other fields."""
    values: dict[str, Any] = {
        "optimizer": "greedy",
        "gpu": "NVIDIA GeForce RTX 4090",
        "budget_bytes": 700 * MIB,
        "process_bytes": 600 * MIB,
        "peak_reserved_bytes": 200 * MIB,
        "peak_allocated_bytes": 200 * MIB,
        "peak_phase": "backward",
        "peak_module": "3",
        "keep_process_bytes": 800 * MIB,
        "step_seconds": 1.25,
        "keep_step_seconds": 1.0,
        "bound_step_seconds": 1.2,
        "host_bytes": 0,
        "planning_seconds": 0.01,
    }
    chosen = {unit: Decision(decision) for unit, decision in decisions.items()}
    return Plan(decisions=chosen, units=units, **{**values, **figures})
