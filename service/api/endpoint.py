"""How a route reads a JSON body and sends an answer without the framework's own machinery.

The hot routes are ASGI applications by themselves: FastAPI's dependencies, a second validation and a thread for every request
would each add between a tenth and a half to the cost of an answer (benchmarks/http_latency.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ..middleware.limits import INLINE_BODY_BYTES
from .microbatch import Together

JSON: Final = "application/json"


class JsonEndpoint:
    """ASGI application that turns a JSON body into a JSON body.

    Args:
        answer: does it.
        inline_bytes: longer bodies are answered in a thread; 0 where every question takes long.
        together: answers the short ones, several at once where several are there; they are answered one by one unless given.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes], inline_bytes: int = INLINE_BODY_BYTES, together: Together | None = None
    ) -> None:
        self.answer = answer
        self.inline_bytes = inline_bytes
        self.together = together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON.
            FieldError: when something in the body is at fault.
        """
        body = await read_json_body(scope, receive)
        if body is None:
            return
        if len(body) > self.inline_bytes:
            content = await run_in_threadpool(self.answer, body)
        elif self.together is None:
            content = self.answer(body)
        else:
            content = await self.together.answer(body)
        await send_answer(send, 200, JSON, content)


async def read_json_body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body, or ``None`` when the client left before it was sent.

    Raises:
        HTTPException: 415 when the body is not declared as JSON.
    """
    if not _declared_as_json(scope):
        raise HTTPException(415, f"the body must be sent with the header 'Content-Type: {JSON}'")
    return await read_body(receive)


async def read_body(receive: Receive) -> bytes | None:
    """The whole body of whatever kind, or ``None`` when the client left before it was sent."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_answer(send: Send, status: int, media_type: str, content: bytes) -> None:
    """One whole answer."""
    headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _declared_as_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            media_type: bytes = value.partition(b";")[0].strip().lower()
            return media_type == JSON.encode()
    return False
