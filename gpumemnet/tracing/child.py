"""The child process of a trace, ``python -m gpumemnet.tracing.child``."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpumemnet.extract.source import build, source_code
from gpumemnet.sandbox.child import serve
from gpumemnet.tracing.report.answer import TraceAnswer, answer_to_dict
from gpumemnet.tracing.request import Asked, asked_from_dict

_LOG: Final = logging.getLogger("gpumemnet.tracing")


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    answer = _of_script if question["kind"] == "script" else _of_file
    return answer_to_dict(answer(question, asked_from_dict(question)))


def _of_script(question: dict[str, Any], what: Asked) -> TraceAnswer:
    _LOG.info("importing torch")
    from gpumemnet.tracing.platform import Platform
    from gpumemnet.tracing.script.run import trace_script

    _LOG.info("running up to the second step")
    platform = Platform(device=what.gpu, attention_kernel=what.options.attention_kernel)
    return trace_script(
        *(Path(question["script"]), question["arguments"], platform, what.allocator),
        ranks=question["ranks"],
        with_curve=what.questions.curve,
    )


def _of_file(question: dict[str, Any], what: Asked) -> TraceAnswer:
    code = source_code(question)
    _LOG.info("importing torch")
    from gpumemnet.tracing.best_effort import BestEffort, NotedUnknowns
    from gpumemnet.tracing.dynamo import without_dynamo
    from gpumemnet.tracing.model_trace import trace_with

    _LOG.info("building the model")
    unknowns = BestEffort() if what.options.best_effort else NotedUnknowns()
    with without_dynamo():
        built, inputs = build(question, code, unknowns=unknowns, with_loss=True)
        options = what.options if built.loss is None else replace(what.options, loss=built.loss)
        answer = trace_with(built.model, inputs, options, gpu=what.gpu, allocator=what.allocator, questions=what.questions)
    return replace(answer, notes=(*unknowns.notes, *answer.notes))


if __name__ == "__main__":
    serve(_answer)
