"""Plans the training of a user's model in a child process, so that user code cannot affect the
caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from gpumemnet.extract.source import factory_request
from gpumemnet.planner.answer import PlanAnswer, plan_answer_from_dict
from gpumemnet.planner.machine import requested_machine
from gpumemnet.planner.options import PlanRequest
from gpumemnet.sandbox.parent import Child, Progress, ask
from gpumemnet.tracing.options import DEADLINE_SECONDS

_CHILD: Final = Child(
    module="gpumemnet.planner.child", result="a plan", purpose="planning the training of a model"
)


def plan_file(
    source: str,
    request: PlanRequest,
    *,
    inputs: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
    progress: Progress | None = None,
) -> PlanAnswer:
    """Plan how the model that ``source`` builds fits the memory that is available.

    Args:
        source, inputs, arguments, batch_size: as in :func:`gpumemnet.tracing.process.trace_file`.
        request: how it is trained, on which GPU, and how to plan.
        deadline_seconds: time for everything, including the import of torch.
        show_output: whether to pass the file's own output on to standard error.
        progress: called with a few words at each stage.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidJobError, InvalidRequestError: an input has another form, options exclude each other,
            or the GPU has no rates.
        MissingExtraError: torch is not installed.
    """
    requested_machine(request)  # a machine without rates is refused before the child starts
    document = {
        **factory_request(source, inputs, arguments, batch_size),
        "request": asdict(request),
    }
    answer = ask(
        _CHILD,
        source,
        document,
        deadline_seconds=deadline_seconds,
        show_output=show_output,
        progress=progress,
    )
    return plan_answer_from_dict(answer)
