"""Plans a training step that does not fit: which modules keep, recompute or swap what the backward
pass needs.

The parts, in the order of use:

* ``gpumemnet.planner.step_units.split_step(model, inputs, request) -> StepCosts`` traces one model
  without a GPU and splits its training step into units, with the memory and the modelled time of
  each;
* ``gpumemnet.planner.costs.find_machine(name_or_path, host_memory_bytes) -> Machine`` gives the
  rates of a GPU and its host;
* ``gpumemnet.planner.planned_step.simulate(step, machine, decisions) -> Simulation`` gives peak memory
  and step time of a plan;
* ``gpumemnet.planner.plan_choice.choose_plan(step, machine, budget_bytes, optimizer="greedy") -> Plan``
  finds a plan that fits;
* ``gpumemnet.planner.applied(model, plan)`` applies a plan to a model.

Importing this package loads neither torch nor scipy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumemnet.planner.plans import Decision, Plan, load_plan, plan_from_dict, plan_to_dict

if TYPE_CHECKING:
    from gpumemnet.planner.executor import applied

__all__ = ["Decision", "Plan", "applied", "load_plan", "plan_from_dict", "plan_to_dict"]


def __getattr__(name: str) -> Any:
    if name == "applied":  # its module loads torch
        from gpumemnet.planner.executor import applied

        return applied
    raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
