"""What every request passes before it reaches an operation: the protocol, then the one middleware
around the application.

*The protocol* is uvicorn's.  It also reads the body of a request that offers to upgrade the
connection, and leaves an idle client half a second when the service ends.  Slow, giant and too many
requests of strangers are the business of the proxy in front (``deploy/nginx``).

*The middleware* checks host, key and concurrency, turns errors into problem documents, then logs and
counts the request.  It is pure ASGI and a single layer, because each further layer would cost as much
as all of it.  Requests beyond the concurrency limit are rejected at once and not queued: after half a
second, a scheduler has already continued with its default.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count
from time import perf_counter
from typing import Final

import httptools
import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumemnet.errors import FieldError

from .access import ANY, ApiKey, allows
from .handlers import send_response
from .monitoring import IN_WORK, REFUSALS, REQUEST_ID, record_request
from .problems import (
    FORBIDDEN,
    INTERNAL_ERROR,
    INVALID_HTTP,
    MEDIA_TYPE,
    MISDIRECTED,
    OVERLOADED,
    UNAUTHORIZED,
    Refusal,
    problem_document,
)

DRAIN_SECONDS: Final = 0.5
"""How long an idle connection stays open when the service ends: a request may be on its way."""
CLIENT_LEFT: Final = 499
"""Status in logs and metrics when the client disconnected before the response; it is never sent."""
ANY_KEY: Final = "any"
"""For paths that need a key with any scope."""

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, version 00."""
_NOSNIFF: Final = (b"x-content-type-options", b"nosniff")

logger = logging.getLogger("gpumemnet.service")


class LenientProtocol(HttpToolsProtocol):
    """One connection of a client."""

    _is_ending = False

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("the request is not valid HTTP/1.1")

    def on_headers_complete(self) -> None:
        """The head is complete: the application begins."""
        if not self.parser.should_upgrade():  # else the head is read again without its upgrade
            super().on_headers_complete()
            self.cycle.keep_alive = self.cycle.keep_alive and not self._is_ending

    def on_message_complete(self) -> None:
        """The request is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def shutdown(self) -> None:
        """The service ends: answer what is in work, and what is on its way."""
        self._is_ending = True
        if self.cycle is not None:
            self.cycle.keep_alive = False
        self.loop.call_later(DRAIN_SECONDS, super().shutdown)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the head again without its ``Upgrade``: the parser reads no body after one."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        fields = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not supported")
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        head = [b"%s %s HTTP/%s" % (method, self.url, version), *fields, b"", rest]
        self.data_received(b"\r\n".join(head))


@dataclass(frozen=True, eq=False)
class PathRule:
    """The rules of one path or of several.

    Attributes:
        name: the path, its variable parts in braces.
        scope: the required scope of the key; :data:`ANY_KEY`; or ``None`` when no key is required.
        is_limited: whether hosts and concurrency are limited; never for health and metrics.
    """

    name: str
    scope: str | None = None
    is_limited: bool = True


# A fixed list, so that clients cannot add names to the metrics.  An unlisted path needs a key: a new
# route is closed until it is opened here.
_RULES: Final = (
    *(PathRule(path, is_limited=False) for path in ("/healthz", "/readyz", "/metrics")),
    *(PathRule(path) for path in ("/", "/docs", "/openapi.json")),
    *(
        PathRule(f"/v1/{name}", "predict")
        for name in (
            *("predict", "predict/batch", "batch-sizes", "fit", "fit/models", "gpus", "models"),
        )
    ),
    PathRule("/v1/observations", "observe"),
)
_EXACT: Final = {rule.name: rule for rule in _RULES}
_BELOW: Final = (
    ("/page/", PathRule("/page/{file}")),
    ("/docs/", PathRule("/docs/{file}")),
    ("/v1/observations", PathRule("/v1/observations/{rest}", "observe")),
    ("/v1/", PathRule("/v1/{rest}", "predict")),
)
_OTHER: Final = PathRule("{other}", ANY_KEY)


def rule_of(path: str) -> PathRule:
    """The rules of ``path``, as the server has decoded it."""
    if (rule := _EXACT.get(path)) is not None:
        return rule
    return next((rule for start, rule in _BELOW if path.startswith(start)), _OTHER)


@dataclass(kw_only=True, eq=False)
class AccessControl:
    """ASGI middleware.

    It sets ``request_id``, and ``key_name`` when a key was sent, in ``scope["state"]``.  Every
    response gets an ``X-Request-ID``, and a header that stops browsers from guessing its media
    type.

    Attributes:
        app: the application.
        keys: the API keys by the hash of each; ``None`` when no key is required.
        hosts: the hosts that requests may be addressed to, see :func:`~service.api.access.allows`.
        max_concurrency: most requests in progress at once.
    """

    app: ASGIApp
    keys: Mapping[bytes, ApiKey] | None = None
    hosts: frozenset[str] = frozenset({ANY})
    max_concurrency: int = 256
    _in_work: int = 0
    _id_start: str = field(default_factory=partial(secrets.token_hex, 8))
    _ids: Iterator[int] = field(default_factory=count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_seconds = perf_counter()
        rule = rule_of(scope["path"])
        presented: bytes | None = None
        request_id = trace_id = ""
        hosts: list[bytes] = []
        origins: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"authorization":
                if value[:7].lower() == b"bearer ":
                    presented = value[7:].strip()
            elif name == b"x-request-id":
                if _REQUEST_ID.fullmatch(value):
                    request_id = value.decode("ascii")
            elif name == b"traceparent":
                if found := _TRACE_PARENT.fullmatch(value):
                    trace_id = found[1].decode("ascii")
            elif name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
        request_id = request_id or f"{self._id_start}{next(self._ids):08x}"
        REQUEST_ID.set(request_id)
        own_headers = [(b"x-request-id", request_id.encode("ascii"))]
        status = sent_bytes = 0

        async def send_on(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                # A new list: an application may send its own again.
                headers = [*message.get("headers", ()), *own_headers]
                if _NOSNIFF not in headers:
                    headers.append(_NOSNIFF)
                message = {"type": "http.response.start", "status": status, "headers": headers}
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        key = None
        if self.keys is not None and presented is not None:
            # The time that this takes tells nothing: nobody can choose the hash of a guess.
            key = self.keys.get(sha256(presented).digest())
        if rule.is_limited:
            self._in_work += 1
            IN_WORK.inc()
        try:
            if len(hosts) != 1 and scope["http_version"] == "1.1":  # RFC 9112, section 3.2
                detail = f"the request must name one Host, not {len(hosts)}"
                raise Refusal(INVALID_HTTP, detail)
            if rule.is_limited:  # probes use the address of a container
                self._check_hosts(*hosts, *origins)
            if self.keys is not None and rule.scope is not None:
                _check_key(key, rule.scope, presented)
            if rule.is_limited:
                if self._in_work > self.max_concurrency:
                    detail = "too many requests are in progress: try again later"
                    raise Refusal(OVERLOADED, detail)
                # Count the requests that arrived meanwhile before the work begins.
                await asyncio.sleep(0)
            state = scope.setdefault("state", {})
            state["request_id"] = request_id
            if key is not None:
                state["key_name"] = key.name
            await self.app(scope, receive, send_on)
        except (FieldError, HTTPException) as error:
            await _send_problem(send_on, error, scope)
        except Exception as error:
            logger.error("a request failed: %s", type(error).__name__, exc_info=error)
            if status == 0:
                detail = f"an unexpected error occurred; the cause is in the log of the service, at the request id {request_id}"
                await _send_problem(send_on, Refusal(INTERNAL_ERROR, detail), scope)
        except asyncio.CancelledError:  # the service stops, and its shutdown time is over
            if status:
                raise
            stopping = Refusal(OVERLOADED, "the service is stopping: try again")
            await _send_problem(send_on, stopping, scope)
        finally:
            if rule.is_limited:
                self._in_work -= 1
                IN_WORK.dec()
            record_request(
                scope["method"],
                rule.name,
                status or CLIENT_LEFT,
                perf_counter() - began_seconds,
                sent_bytes,
                key="" if key is None else key.name,
                trace_id=trace_id,
            )

    def _check_hosts(self, *named: bytes) -> None:
        """Refuse a host that is not allowed."""
        for host in named:
            if not allows(self.hosts, host):
                raise Refusal(
                    MISDIRECTED,
                    f"requests for or from {host[:100].decode('latin-1')!r} are not answered: use a name of this machine, such as "
                    "localhost, or list the host in GPUMEMNET_ALLOWED_HOSTS",
                )


def _check_key(key: ApiKey | None, scope: str, presented: bytes | None) -> None:
    """Refuse a request without a key of the scope."""
    if key is None:
        reason = "the API key is unknown" if presented is not None else "an API key is required"
        detail = f"{reason}: send one as 'Authorization: Bearer KEY'"
        raise Refusal(UNAUTHORIZED, detail)
    if scope != ANY_KEY and scope not in key.scopes:
        allowed = ", ".join(sorted(key.scopes))
        detail = f"the API key {key.name!r} does not allow {scope!r}: {allowed}"
        raise Refusal(FORBIDDEN, detail)


async def _send_problem(send: Send, error: FieldError | HTTPException, scope: Scope) -> None:
    document = problem_document(error, scope["method"], scope["path"])
    REFUSALS.labels(document["type"].rpartition(":")[2]).inc()
    given = error.headers or {} if isinstance(error, HTTPException) else {}
    headers = ((name.lower().encode(), value.encode()) for name, value in given.items())
    await send_response(send, document["status"], MEDIA_TYPE, orjson.dumps(document), *headers)
