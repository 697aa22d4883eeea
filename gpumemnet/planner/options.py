"""What a plan is asked with besides the model.  This module loads no torch, so the parent of a
child process uses it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu.available import available_mib, with_available
from gpumemnet.job.layers import describe
from gpumemnet.tracing.options import TraceRequest, request_from_dict
from gpumemnet.units import MIB

DEFAULT_PLANNER: Final = "greedy"
PLANNERS: Final = (
    *("greedy", "exact", "swarm", "capuchin", "autoswap"),
    *("every_block", "every_sqrt", "vdnn_all", "vdnn_convolutions"),
)
"""Names of the searches, see :data:`gpumemnet.planner.choose.SEARCHES`; those from ``capuchin`` on
are for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked with besides the model.

    Attributes:
        trace: how the model is trained, and the GPU; the memory that is available on it is the
            budget.
        planner: name of the search.
        machine: GPU of the catalogue, or path of a file, whose rates give the times; ``None`` for
            those of the GPU.
        host_bytes: pinned host memory that may be used; ``None`` for what the machine has.
        with_alternatives: whether to trace other settings of the job too.
        with_searches: whether to run every search for several budgets too, for a picture.

    Raises:
        InvalidRequestError: there is no such search.
    """

    trace: TraceRequest
    planner: str = DEFAULT_PLANNER
    machine: str | None = None
    host_bytes: int | None = None
    with_alternatives: bool = True
    with_searches: bool = False

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise InvalidRequestError(
                f"must be one of {', '.join(PLANNERS)}, not {describe(self.planner)}", "planner"
            )


def within_budget(request: TraceRequest, budget_bytes: int | None) -> TraceRequest:
    """Return ``request`` for a GPU on which this much memory is available; all of it without a
    budget.

    Raises:
        InvalidRequestError: the GPU has less.
    """
    if budget_bytes is None:
        return request
    most = available_mib(request.gpu) * MIB
    if not MIB <= budget_bytes <= most:
        raise InvalidRequestError(
            f"must be from 1 MiB to {most // MIB:,} MiB, what a process can use on {request.gpu.name}, "
            f"not {budget_bytes // MIB:,} MiB",
            "budget",
        )
    return replace(request, gpu=with_available(request.gpu, budget_bytes))


def plan_request_from_dict(document: Mapping[str, Any]) -> PlanRequest:
    """Return the request that :func:`dataclasses.asdict` turned into a JSON object."""
    return PlanRequest(**{**document, "trace": request_from_dict(document["trace"])})
