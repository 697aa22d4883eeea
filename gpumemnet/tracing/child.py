"""The child process of a trace: ``python -m gpumemnet.tracing.child``."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpumemnet.extract.source import build, source_code
from gpumemnet.sandbox.child import serve
from gpumemnet.tracing.api import trace_request
from gpumemnet.tracing.options import TraceRequest, request_from_dict
from gpumemnet.tracing.report.answer import TraceAnswer, answer_to_dict

_LOG: Final = logging.getLogger("gpumemnet.tracing")


def _answer(document: dict[str, Any]) -> dict[str, Any]:
    trace_source = _trace_script if document["kind"] == "script" else _trace_file
    return answer_to_dict(trace_source(document, request_from_dict(document)))


def _trace_script(document: dict[str, Any], request: TraceRequest) -> TraceAnswer:
    _LOG.info("importing torch")
    from gpumemnet.tracing.platform import Platform, with_cudnn
    from gpumemnet.tracing.script.batches import trace_batches
    from gpumemnet.tracing.script.run import ScriptCall, trace_script

    _LOG.info("running up to the second step")
    platform = Platform(device=request.gpu, attention_kernel=request.options.attention_kernel)
    platform, notes = with_cudnn(platform, request.cudnn)
    call = ScriptCall(
        script=Path(document["script"]),
        arguments=tuple(document["arguments"]),
        platform=platform,
        settings=request.allocator,
        is_module=document["is_module"],
        ranks=document["ranks"],
        other_way=document["other_way"],
        selected_share=document["selected_share"],
        best_effort=request.options.best_effort,
    )
    extras = request.extras
    if extras.batches or extras.max_batch:
        answer = trace_batches(call, extras, document["batch_argument"])
    else:
        answer = trace_script(call, with_curve=extras.curve)
    return replace(answer, notes=(*answer.notes, *notes))


def _trace_file(document: dict[str, Any], request: TraceRequest) -> TraceAnswer:
    code = source_code(document)
    _LOG.info("importing torch")
    from gpumemnet.torch_private.training import without_dynamo
    from gpumemnet.tracing.missing_values import GuessedValues, RefusedValues

    _LOG.info("building the model")
    missing_values = GuessedValues() if request.options.best_effort else RefusedValues()
    with without_dynamo():
        built, inputs = build(
            document, code, missing_values=missing_values, with_loss=True, keep_values=True
        )
        options = (
            request.options if built.loss is None else replace(request.options, loss=built.loss)
        )
        answer = trace_request(built.model, inputs, replace(request, options=options))
    return replace(answer, notes=(*missing_values.notes, *answer.notes))


if __name__ == "__main__":
    serve(_answer)
