"""One connection of a client: limits on its request heads and its waiting, and answers that never
get out of step.

It extends uvicorn's protocol, which bounds neither the size of a head nor the time before it is
complete, loses the body of a request that offers to upgrade the connection, and answers an invalid
request before the valid ones that came first.
"""

from __future__ import annotations

import asyncio
import resource
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from time import monotonic
from typing import Final

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .api.problems import (
    INVALID_HTTP,
    LARGE_HEAD,
    MEDIA_TYPE,
    OVERLOADED,
    REQUEST_TIMEOUT,
    ProblemKind,
    Refusal,
)
from .middleware.metrics import REFUSED
from .middleware.rate import client_of_address

RESERVED_DESCRIPTORS: Final = 64
"""File descriptors that connections leave for the database, the models and the log."""
LOOK_SECONDS: Final = 0.5
"""Greatest delay of a time limit."""
LINGER_SECONDS: Final = 1.0
"""How long a refused client may go on sending: closing at once would take the error away from it
(RFC 9112, section 9.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one worker.

    Attributes:
        head_bytes, head_fields: largest request head, and most fields in it.
        head_seconds: longest time until the first byte of a connection, and from the first byte of
            a head to its last.
        body_seconds: longest time from the end of a head to the end of the body.
        idle_seconds: longest time between a response and the next request.
        connections, connections_per_address: most open connections; 0 for any number.
    """

    head_bytes: int
    head_fields: int
    head_seconds: float
    body_seconds: float
    idle_seconds: float
    connections: int
    connections_per_address: int


class Waiting(Enum):
    """What a connection waits for."""

    FIRST_BYTE = auto()
    HEAD = auto()
    BODY = auto()
    RESPONSE = auto()
    NEXT_REQUEST = auto()
    END = auto()


class Connections:
    """The open connections of one worker; one timer looks after all of them.

    Attributes:
        limits: the limits.
        most: most open connections; fewer than the limit where the process may open fewer files.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = (
            descriptors - RESERVED_DESCRIPTORS
            if descriptors != resource.RLIM_INFINITY
            else limits.connections
        )
        self.most = max(1, min(limits.connections, room))
        self._open: set[Connection] = set()
        self._of_address: dict[str, set[Connection]] = defaultdict(set)
        self._is_looking = False

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Add a connection; where there is no room, one that waits for a request is closed.
        Returns whether there is room."""
        own, most_own = self._of_address[connection.address], self.limits.connections_per_address
        is_room = (not most_own or len(own) < most_own or self._close_one(own)) and (
            len(self._open) < self.most or self._close_one(self._open)
        )
        self._open.add(connection)
        self._of_address[connection.address].add(connection)
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        return is_room

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        own = self._of_address.get(connection.address, set())
        own.discard(connection)
        if not own:
            self._of_address.pop(connection.address, None)

    def _close_one(self, connections: set[Connection]) -> bool:
        """Close the one of ``connections`` that has waited longest for a request; returns whether
        there was one."""
        waiting = [one for one in connections if one.gives_way]
        if waiting:
            longest = min(waiting, key=lambda one: one.since_seconds)
            self.remove(longest)
            longest.transport.abort()
        return bool(waiting)

    def _look(self) -> None:
        now_seconds = monotonic()
        for connection in list(self._open):
            connection.check_time(now_seconds)
        self._is_looking = bool(self._open)
        if self._is_looking:
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)


class Connection(HttpToolsProtocol):
    """One connection; :func:`connection_type` makes the class of a worker's connections."""

    others: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it."""
        super().connection_made(transport)
        self.address = client_of_address(self.client[0] if self.client else "")
        self._is_over = False
        self._refusal = b""
        self._unanswered = 0
        self._head_bytes = self._unfinished_bytes = self._head_fields = 0
        self._wait(Waiting.FIRST_BYTE)
        if not self.others.admit(self):
            REFUSED["connections"].inc()
            self._refuse(
                OVERLOADED, "too many connections are open: try again later", b"retry-after: 1\r\n"
            )
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.others.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        while data and not self._is_over:
            self._unset_keepalive_if_required()
            self._unfinished_bytes += len(data)
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
            except httptools.HttpParserError:
                if not self._is_over:
                    self.send_400_response("")
                return
        if (
            not self._is_over
            and self._head_bytes + self._unfinished_bytes > self.others.limits.head_bytes
        ):
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_bytes = self._head_fields = 0
        self._wait(Waiting.HEAD)

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head."""
        super().on_header(name, value)
        self._head_fields += 1
        self._count_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        """The head is complete: the application begins, unless the head must be read again without
        its upgrade."""
        self._head_bytes = self._unfinished_bytes = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._unanswered += 1
            self._wait(Waiting.BODY)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._unfinished_bytes = 0
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._wait(Waiting.NEXT_REQUEST if self.cycle.response_complete else Waiting.RESPONSE)

    def on_response_complete(self) -> None:
        """A response is complete: the next request begins, or a refusal is sent that waited for its
        turn."""
        self._unanswered -= 1
        super().on_response_complete()
        if self._refusal and not self._unanswered:
            self._send_last(self._refusal)
        elif self.waits_for is Waiting.RESPONSE and not self._unanswered:
            self._wait(Waiting.NEXT_REQUEST)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not valid HTTP."""
        REFUSED["invalid"].inc()
        self._refuse(INVALID_HTTP, "the request is not valid HTTP/1.1")

    @property
    def gives_way(self) -> bool:
        """Whether closing the connection cuts no request whose head has arrived."""
        return self.waits_for not in (Waiting.BODY, Waiting.RESPONSE) and not self._unanswered

    def check_time(self, now_seconds: float) -> None:
        """End the connection when its client takes too long."""
        limits = self.others.limits
        most_seconds = {
            Waiting.FIRST_BYTE: limits.head_seconds,
            Waiting.HEAD: limits.head_seconds,
            Waiting.BODY: limits.body_seconds
            + 2 * LOOK_SECONDS,  # the application refuses it first, with a response
            Waiting.NEXT_REQUEST: limits.idle_seconds,
            Waiting.END: LINGER_SECONDS,
        }.get(self.waits_for)
        if most_seconds is None or now_seconds - self.since_seconds <= most_seconds:
            return
        if self.flow.read_paused or (self._unanswered and self.waits_for is not Waiting.BODY):
            return  # the client waits for the service, and not the other way round
        if self.waits_for is Waiting.HEAD:
            REFUSED["slow_head"].inc()
            self._refuse(
                REQUEST_TIMEOUT,
                f"the head of the request has not arrived within {most_seconds:g} s",
            )
        else:
            self.transport.close()

    def _wait(self, waits_for: Waiting) -> None:
        self.waits_for = waits_for
        self.since_seconds = (
            monotonic()
        )  # finer than the loop's clock: the order of connections must be known

    def _count_head(self, count: int) -> None:
        limits = self.others.limits
        self._head_bytes += count
        self._unfinished_bytes = 0
        if self._head_bytes > limits.head_bytes or self._head_fields > limits.head_fields:
            self._refuse_head()
            raise ValueError("the head is too large")  # ends the parsing

    def _refuse_head(self) -> None:
        limits = self.others.limits
        REFUSED["large_head"].inc()
        self._refuse(
            LARGE_HEAD,
            f"the request's head is larger than {limits.head_bytes} bytes or has more than {limits.head_fields} fields",
        )

    def _ignore_upgrade(self) -> None:
        """Read the head again without its ``Upgrade`` field, because the parser does not read the
        body of such a request."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        fields = [(name, value) for name, value in self.headers if name != b"upgrade"]
        if method == b"CONNECT":
            self.send_400_response("")
            return
        lines = [
            b"%s %s HTTP/%s" % (method, self.url, version),
            *(b"%s: %s" % field for field in fields),
            b"",
            b"",
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"\r\n".join(lines))

    def _refuse(self, kind: ProblemKind, detail: str, fields: bytes = b"") -> None:
        """Send an error, after the responses to the requests that came before, and close the
        connection."""
        self._is_over = True
        body = orjson.dumps(Refusal(kind, detail).document())
        head = (
            f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        response = head.encode() + fields + b"\r\n" + body
        if self.waits_for is Waiting.BODY and not self.cycle.response_complete:
            self._give_up_request()
        if self._unanswered:
            self._refusal = response
        else:
            self._send_last(response)

    def _give_up_request(self) -> None:
        """Tell the application that the rest of the current request will not arrive."""
        cycle = self.cycle
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        cycle.disconnected = True
        cycle.message_event.set()
        self._unanswered -= 1
        if cycle.response_started:
            self.transport.close()

    def _send_last(self, response: bytes) -> None:
        """Send the last response of the connection; what still arrives is discarded for a while."""
        self._refusal = b""
        if not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.transport.write(response)
            self.transport.write_eof()
            self._wait(Waiting.END)


def connection_type(limits: ConnectionLimits) -> type[Connection]:
    """The class of one worker's connections."""
    return type("WorkerConnection", (Connection,), {"others": Connections(limits)})
