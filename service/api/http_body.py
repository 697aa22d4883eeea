"""Reads the body of a request and sends the response, through the ASGI interface."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from .operations import JSON


async def read_json_body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body, or ``None`` when the client disconnected before it was sent.

    Raises:
        HTTPException: 415 when the body is not declared as JSON.
    """
    if not _declared_as_json(scope):
        raise HTTPException(415, f"the body must be sent with the header 'Content-Type: {JSON}'")
    return await read_body(receive)


async def read_body(receive: Receive) -> bytes | None:
    """The whole body of any media type, or ``None`` when the client disconnected before it was sent."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_answer(send: Send, status: int, media_type: str, content: bytes) -> None:
    """Send one whole response."""
    headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _declared_as_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            media_type: bytes = value.partition(b";")[0].strip().lower()
            return media_type == JSON.encode()
    return False
