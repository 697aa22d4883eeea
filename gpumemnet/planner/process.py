"""Plans the training of a user's model in a child process, so that user code cannot affect the
caller."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from gpumemnet.extract.source import build, factory_request, source_code
from gpumemnet.planner.answer import PlanAnswer, plan_answer_from_dict, plan_answer_to_dict
from gpumemnet.planner.machine import requested_machine
from gpumemnet.planner.options import PlanRequest, plan_request_from_dict
from gpumemnet.sandbox.process import Progress, ask
from gpumemnet.tracing.api import checked_torch
from gpumemnet.tracing.options import DEADLINE_SECONDS

_LOG: Final = logging.getLogger("gpumemnet.planner")


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
        source, inputs, arguments, batch_size: as in :func:`gpumemnet.tracing.api.trace_file`.
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
        _plan,
        source,
        document,
        purpose="planning the training of a model",
        deadline_seconds=deadline_seconds,
        show_output=show_output,
        progress=progress,
    )
    return plan_answer_from_dict(answer)


def _plan(document: dict[str, Any]) -> dict[str, Any]:
    request = plan_request_from_dict(document["request"])
    code = source_code(document)
    _LOG.info("importing torch")
    torch_notes = checked_torch()
    from gpumemnet.planner.fitting import plan_request
    from gpumemnet.torch_private.training import without_dynamo
    from gpumemnet.tracing.missing_values import GuessedValues, RefusedValues

    _LOG.info("building the model")
    options = request.trace.options
    missing_values = GuessedValues() if options.best_effort else RefusedValues()
    with without_dynamo():
        built, inputs = build(
            document, code, missing_values=missing_values, with_loss=True, keep_values=True
        )
        if built.loss is not None:
            options = replace(options, loss=built.loss)
        answer = plan_request(
            built.model,
            inputs,
            replace(request, trace=replace(request.trace, options=options)),
            torch_notes,
        )
    before = replace(answer.before, notes=(*missing_values.notes, *answer.before.notes))
    return plan_answer_to_dict(replace(answer, before=before))
