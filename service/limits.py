"""Limits that hold before a request is understood: what a body may weigh, and what may be answered on the event loop.

The body limit is a pure ASGI middleware that counts while the body arrives, so neither a missing nor a false Content-Length
gets round it.  The one that FastAPI offers answers in plain text, and every error of this service is a problem document.
"""

from __future__ import annotations

from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

INLINE_BODY_BYTES: Final = 32 * 1024
"""Longer bodies are answered in a worker thread, so that one long batch does not hold up the short requests beside it."""

MAX_PROBABILITIES: Final = 2**18
"""Most probabilities in one answer (jobs times bins): bounds the memory of a batch at narrow bins."""


class BodyLimit:
    """ASGI middleware that raises a 413 as soon as more than ``max_body_bytes`` are announced or have arrived.

    The connection is closed after the answer: the rest of the body is never read.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, its body counted."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        announced_bytes = int(announced)  # digits alone: the server has checked
        received_bytes = 0

        async def receive_limited() -> Message:
            nonlocal received_bytes
            if announced_bytes > self.max_body_bytes:
                raise self._too_large()
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self.max_body_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_limited, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413,
            f"the body is larger than the {self.max_body_bytes} bytes that this service reads: send fewer jobs at a time",
            headers={"Connection": "close"},
        )
