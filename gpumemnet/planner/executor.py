"""Applies a plan to a model in eager PyTorch, without a change of its code, its module names or its
``state_dict``.

The forward pass of each unit is replaced on the instance: ``module.forward`` becomes a
:class:`UnitForward`, which can be copied and pickled with the model.  Recomputation, and what is
refused, is in :mod:`gpumemnet.planner.recomputing`, swapping in
:mod:`gpumemnet.planner.swapping`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from gpumemnet.errors import PlanError
from gpumemnet.planner.plans import Decision, Plan, checked_decisions, load_plan
from gpumemnet.planner.recomputing import StateCheck, check_plan, has_values, recompute, verify
from gpumemnet.planner.swapping import Swaps
from gpumemnet.torch_private.names import Function

_FORWARD: Final = "forward"


def applied(
    model: nn.Module, plan: Plan | Mapping[str, str] | Path | str, *, verify: bool = True
) -> AppliedPlan:
    """Let ``model`` keep, recompute and swap as ``plan`` says; losses and gradients stay the same
    to the last bit.

    The plan is in force from this call on, until the context is left or :meth:`AppliedPlan.undo` is
    called.

    Args:
        model: the model, on any device, before ``torch.compile``.
        plan: the plan, the path of its file, or a decision for each module by its name.
        verify: whether each module that is recomputed first runs forward and backward with and
            without the plan, on the tensors of its first forward pass, and must give the same; and
            whether what it swaps then must come back as it was.

    Raises:
        InvalidRequestError: the file holds no plan, or there is no such decision.
        PlanError: the plan does not belong to the model, or the model would compute something else
            under it; some of that shows in the first forward pass only.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> with applied(model, {"0": "recompute"}):
        ...     model(torch.ones(2, 8)).sum().backward()
    """
    return AppliedPlan(model, load_plan(plan) if isinstance(plan, Path | str) else plan, verify)


class AppliedPlan(ExitStack):
    """A plan in force; see :func:`applied`."""

    def __init__(self, model: nn.Module, plan: Plan | Mapping[str, str], verifies: bool) -> None:
        super().__init__()
        decisions = plan.decisions if isinstance(plan, Plan) else checked_decisions(plan)
        self._swaps = Swaps()
        units = check_plan(model, decisions)
        if any(decision.swaps for decision in decisions.values()):
            # Memory is released and fetched when other units run, those that keep everything among
            # them.
            others = plan.units if isinstance(plan, Plan) else ()
            kept = {name: Decision.KEEP for name in others if name not in decisions}
            units |= check_plan(model, kept)
        own = {module: vars(module).get(_FORWARD) for module in units}
        for module, name in units.items():
            if isinstance(own[module], UnitForward):
                raise PlanError(f"a plan is applied to '{name}' already: undo that one first")
        for module, name in units.items():
            decision = decisions.get(name, Decision.KEEP)
            forward = UnitForward(module, name, decision, self._swaps, verifies, own[module])
            module.forward = forward
            self.callback(forward.remove)

    @property
    def host_bytes(self) -> int:
        """The most host memory that swapped tensors have taken at one time."""
        return self._swaps.peak_host_bytes

    def undo(self) -> None:
        """Give the modules back their own forward passes; without effect if that was done."""
        self.close()


@dataclass(eq=False)
class UnitForward:
    """The forward pass of a unit under a plan.

    Attributes:
        module: the unit.
        name: its name.
        decision: the decision.
        swaps: the table of swapped storages of the model.
        verifies: whether its first forward pass is checked.
        replaced: what stood in its place in the module itself, if anything did.
    """

    module: nn.Module
    name: str
    decision: Decision
    swaps: Swaps
    verifies: bool
    replaced: Function | None
    _is_first: bool = True
    _is_in_force: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass as the plan says."""
        # Without a bound method among the attributes: it would be pickled by its name, which now
        # leads here.
        own = self.replaced or MethodType(type(self.module).forward, self.module)
        if not (self._is_in_force and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        checks = self.verifies and has_values(self.module, (args, kwargs))
        if checks:
            self.verifies = False
        if checks and self.decision.recomputes:
            self._is_first = False
            verify(self.module, self.name, own, partial(self._run, own), args, kwargs)
        with self.swaps.running(self.module, self.decision.swaps, checks) as run:
            output = self._run(own, *args, **kwargs)
        run.watch(output)
        return output

    def remove(self) -> None:
        """Give the module back its own forward pass."""
        self._is_in_force = (
            False  # something may have been put around this object, and call it still
        )
        if vars(self.module).get(_FORWARD) is self:
            if self.replaced is None:
                del self.module.forward
            else:
                self.module.forward = self.replaced

    def _run(self, own: Function, /, *args: Any, **kwargs: Any) -> Any:
        if not self.decision.recomputes:
            return own(*args, **kwargs)
        state = StateCheck(self.module, self.name, (args, kwargs), self._is_first)
        self._is_first = False
        output = recompute(
            self.module, own, args, kwargs, cheap=self.decision is Decision.RECOMPUTE_CHEAP
        )
        state.check()
        return output
