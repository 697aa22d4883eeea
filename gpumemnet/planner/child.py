"""The child process of a plan: ``python -m gpumemnet.planner.child``."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from gpumemnet.extract.source import build, source_code
from gpumemnet.planner.answer import plan_answer_to_dict
from gpumemnet.planner.options import plan_request_from_dict
from gpumemnet.sandbox.child import serve
from gpumemnet.tracing.api import checked_torch

_LOG: Final = logging.getLogger("gpumemnet.planner")


def _answer(document: dict[str, Any]) -> dict[str, Any]:
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


if __name__ == "__main__":
    serve(_answer)
