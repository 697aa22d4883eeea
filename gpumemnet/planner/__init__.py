"""Plans a training step that does not fit: which modules keep, recompute or swap what the backward pass needs.

The parts, in the order of use:

* ``gpumemnet.planner.units.plan_units(model, inputs, request) -> StepCosts`` traces one model without a GPU and splits its
  training step into units, with the memory and the modelled time of each;
* ``gpumemnet.planner.machine.find_machine(name_or_path) -> Machine`` gives the rates of a GPU and its host;
* ``gpumemnet.planner.simulator.simulate(step, machine, decisions) -> Simulation`` gives peak memory and step time of a plan;
* ``gpumemnet.planner.choose.choose_plan(step, machine, budget_bytes, optimizer="greedy") -> Plan`` finds a plan that fits;
* ``gpumemnet.planner.executor`` applies a plan to a model.

Importing this package loads neither torch nor scipy.
"""

from __future__ import annotations

from gpumemnet.planner.decisions import Decision, Plan, plan_from_dict, plan_to_dict

__all__ = ["Decision", "Plan", "plan_from_dict", "plan_to_dict"]
