"""uvicorn's HTTP protocol with bounds: how large a head may be, how long head and body may take, and
how many connections are open.

It also reads the body of a request that offers to upgrade the connection, answers an invalid
request after the valid ones that came before it, and leaves an idle client half a second when the
service ends.  Hostile strangers are the business of the proxy in front (``deploy/nginx``).
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .api.monitoring import REFUSALS
from .api.problems import (
    INVALID_HTTP,
    LARGE_HEAD,
    MEDIA_TYPE,
    OVERLOADED,
    REQUEST_TIMEOUT,
    ProblemKind,
    Refusal,
    problem_document,
)

MAX_HEAD_BYTES: Final = 32 * 1024
MAX_HEAD_FIELDS: Final = 100
BODY_FACTOR: Final = 3.0
"""How many times as long as its head a request's body may take."""
DRAIN_SECONDS: Final = 0.5
"""How long an idle connection stays open when the service ends: a request may be on its way."""
LINGER_SECONDS: Final = 1.0
"""How long a refused client may go on sending: closing at once would take the error away from it
(RFC 9112, section 9.6)."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection of a client; the application holds the settings."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; at the limit an idle one is closed, or else the new one refused."""
        super().connection_made(transport)
        settings = self.app.state.settings
        self._head_seconds: float = settings.head_seconds
        self._head_bytes, self._is_in_head = 0, True
        self._is_over = self._is_ending = False
        self._last_response = b""
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > settings.max_connections:
            others = (one for one in self.connections if one is not self)
            idle = next((one for one in others if _is_idle(one)), None)
            if idle is None:
                self._refuse(OVERLOADED, "too many connections are open: try again")
                return
            idle.transport.close()
        self._start_timer(self._head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        else:
            if self._is_in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._refuse_head()
                elif self._timer is None:
                    self._start_timer(self._head_seconds)
            elif self._timer is None and self.cycle is not None and self.cycle.more_body:
                self._start_timer(BODY_FACTOR * self._head_seconds)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True

    def on_headers_complete(self) -> None:
        """The head is complete: the application begins."""
        self._head_bytes, self._is_in_head = 0, False
        self._stop_timer()
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEAD_FIELDS or head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
            raise ValueError("the head is too large")  # ends the parsing
        if not self.parser.should_upgrade():  # else the head is read again without its upgrade
            super().on_headers_complete()
            self.cycle.keep_alive = self.cycle.keep_alive and not self._is_ending

    def on_message_complete(self) -> None:
        """The request is complete."""
        if not self.parser.should_upgrade():
            self._stop_timer()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A response is complete; a refusal that waited for its turn follows the last one."""
        super().on_response_complete()
        if self._last_response and self.cycle.response_complete:
            self._end(self._last_response)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not valid HTTP."""
        self._refuse(INVALID_HTTP, "the request is not valid HTTP/1.1")

    def shutdown(self) -> None:
        """The service ends: answer what is in work, and what is on its way."""
        self._is_ending = True
        if _is_idle(self):
            self.loop.call_later(DRAIN_SECONDS, self._close_idle)
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def _close_idle(self) -> None:
        if _is_idle(self):
            self.transport.close()

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._refuse_slow, seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_slow(self, seconds: float) -> None:
        self._timer = None
        if self._is_in_head and not self._head_bytes:  # the client has never sent anything
            self.transport.close()
            return
        part = "head" if self._is_in_head else "body"
        detail = f"the {part} of the request has not arrived within {seconds:g} s"
        self._refuse(REQUEST_TIMEOUT, detail)

    def _refuse_head(self) -> None:
        detail = (
            f"the request's head is larger than {MAX_HEAD_BYTES} bytes or has more than "
            f"{MAX_HEAD_FIELDS} fields"
        )
        self._refuse(LARGE_HEAD, detail)

    def _refuse(self, kind: ProblemKind, detail: str) -> None:
        """Send an error after the responses to the requests before, and end the connection."""
        if self._is_over:
            return
        self._is_over = True
        REFUSALS.labels(kind.name).inc()
        body = orjson.dumps(problem_document(Refusal(kind, detail)))
        head = (
            f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}\r\n"
            f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            f"{'retry-after: 1' + chr(13) + chr(10) if kind is OVERLOADED else ''}\r\n"
        )
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._end(head.encode() + body)
        elif cycle.more_body:  # the body of the request in work is what is not valid
            cycle.disconnected = True
            cycle.message_event.set()
            self._end(b"" if cycle.response_started else head.encode() + body)
        else:
            self._last_response = head.encode() + body

    def _end(self, response: bytes) -> None:
        """Send the last response; what still arrives is discarded for a while."""
        if not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.transport.write(response)
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the head again without its ``Upgrade``: the parser reads no body after one."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        fields = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        if method == b"CONNECT":
            self.send_400_response("")
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        head = [b"%s %s HTTP/%s" % (method, self.url, version), *fields, b"", rest]
        self.data_received(b"\r\n".join(head))


def _is_idle(connection: object) -> bool:
    """Whether a connection waits for a request of which nothing has arrived."""
    assert isinstance(connection, BoundedProtocol)
    cycle = connection.cycle
    return not connection._head_bytes and (cycle is None or cycle.response_complete)
