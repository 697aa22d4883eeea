"""The ASGI applications of the JSON endpoints.

They bypass FastAPI's dependencies, second validation and thread per request.  Each would add between a tenth and a half to the
cost of a response (benchmarks/http_latency.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from ..middleware.limits import INLINE_BODY_BYTES
from .answers import Document, Question, read_question
from .http_body import read_json_body, send_answer
from .microbatch import Microbatch
from .operations import JSON
from .text_response import TEXT_FIELDS, TEXT_UTF8, text_fields, text_of, wants_text


class JsonEndpoint:
    """ASGI application that reads a JSON body and responds with JSON.

    Args:
        answer: makes the response.
        inline_bytes: longer bodies are handled in a thread; 0 when every request takes long.
    """

    def __init__(self, answer: Callable[[bytes], Document], inline_bytes: int = INLINE_BODY_BYTES) -> None:
        self._answer = answer
        self._inline_bytes = inline_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON.
            FieldError: when a field of the body is invalid.
        """
        body = await read_json_body(scope, receive)
        if body is not None:
            is_long = len(body) > self._inline_bytes
            await send_answer(send, 200, JSON, await run_in_threadpool(self._bytes, body) if is_long else self._bytes(body))

    def _bytes(self, body: bytes) -> bytes:
        return orjson.dumps(self._answer(body))


class PredictEndpoint:
    """ASGI application of ``POST /v1/predict``, in JSON or plain text.

    Args:
        answer: takes several questions; returns a prediction or an error for each.
    """

    def __init__(self, answer: Callable[[Sequence[Question]], Sequence[Document | Exception]]) -> None:
        self._answer = answer
        self._microbatch = Microbatch(answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON; 422 when a requested field has no value.
            FieldError: when a field of the body or a query parameter is invalid.
        """
        names = text_fields(query) if (query := scope["query_string"]) else TEXT_FIELDS[:1]
        body = await read_json_body(scope, receive)
        if body is None:
            return
        if len(body) > INLINE_BODY_BYTES:
            document = await run_in_threadpool(self._answer_alone, body)
        else:
            document = await self._microbatch.ask(read_question(body))
        if wants_text(scope):
            await send_answer(send, 200, TEXT_UTF8, text_of(document, names))
        else:
            await send_answer(send, 200, JSON, orjson.dumps(document))

    def _answer_alone(self, body: bytes) -> Document:
        answer = self._answer([read_question(body)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer
