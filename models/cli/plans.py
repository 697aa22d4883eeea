"""Reads the plan files that ``--plan`` names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpumemnet.errors import InvalidRequestError

if TYPE_CHECKING:
    from ..training.plan_file import FoundPlan


def found_plan(path: Path, family: str, encoder: str) -> FoundPlan:
    """Returns the plan in the file ``path``, which must be for this family and encoder.

    Raises:
        InvalidRequestError: when it is for others, or cannot be read.
    """
    from ..training.plan_file import read_plan

    found = read_plan(path)
    if (found.family, found.encoder) != (family, encoder):
        raise InvalidRequestError(
            f"{path} is for {found.family} jobs and the encoder {found.encoder}, not for {family} jobs and {encoder}",
            "plan",
        )
    return found


def found_plans(paths: list[Path]) -> tuple[FoundPlan, ...]:
    """Returns the plans in several files, at most one for each family and encoder.

    Raises:
        InvalidRequestError: when two are for the same, or one cannot be read.
    """
    if not paths:
        return ()
    from ..training.plan_file import read_plan

    plans = tuple(map(read_plan, paths))
    for number, plan in enumerate(plans):
        for earlier in plans[:number]:
            if (plan.family, plan.encoder) == (earlier.family, earlier.encoder):
                raise InvalidRequestError(
                    f"{earlier.name} and {plan.name} are both for {plan.family} jobs and the encoder {plan.encoder}: give one",
                    "plan",
                )
    return plans
