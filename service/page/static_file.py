"""One static file as an ASGI application: read once, then answered from memory with its ETag and its security headers.

A browser asks again each time it needs the file (``no-cache``) and mostly gets 304, so that a new release of the service is
seen at once.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from typing import Final

from starlette.types import Receive, Scope, Send

MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
"""Suffix → type of the files that are served."""

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from other hosts, nothing inline; the page sends its form by script, and no other page may frame it."""


class StaticFile:
    """ASGI application that answers GET and HEAD with one file.

    Args:
        name: its name; the suffix gives the type.
        content: its bytes.
        policy: the Content-Security-Policy that it is sent with.

    Raises:
        KeyError: when the suffix is none of :data:`MEDIA_TYPES`.
    """

    def __init__(self, name: str, content: bytes, policy: str = CONTENT_SECURITY_POLICY) -> None:
        self._content = content
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        shared = {
            "etag": self._etag,
            "cache-control": "no-cache",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        whole = {"content-type": MEDIA_TYPES[PurePosixPath(name).suffix], "content-length": str(len(content))}
        self._headers_unchanged = _raw(shared)
        self._headers = _raw(whole | shared)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        is_unchanged = self._is_held_by(scope)
        is_whole = not is_unchanged and scope["method"] != "HEAD"
        status, headers = (304, self._headers_unchanged) if is_unchanged else (200, self._headers)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": self._content if is_whole else b""})

    def _is_held_by(self, scope: Scope) -> bool:
        """Whether the client says that it has this very content (RFC 9110, section 13.1.2)."""
        tags = [
            tag.strip().removeprefix("W/")
            for name, value in scope["headers"]
            if name == b"if-none-match"
            for tag in value.decode("latin-1").split(",")
        ]
        return self._etag in tags or "*" in tags


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
