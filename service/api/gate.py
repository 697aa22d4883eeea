"""The one middleware around the application: checks host, key and concurrency, then logs and
counts the request.

What a path needs is a fixed list, so that clients cannot add names to the metrics.  An unlisted
path needs a key: a new route is closed until it is opened here.

It is pure ASGI and a single layer, because each further layer would cost as much as all of it.
Requests beyond the concurrency limit are rejected at once and not queued: after half a second, a
scheduler has already continued with its default.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Final

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import AllowedHosts, ApiKey, KeyRing
from .logs import REQUEST_ID, log_request
from .metrics import IN_WORK, REFUSED, RequestMetrics
from .problems import (
    FORBIDDEN,
    INTERNAL_ERROR,
    INVALID_HTTP,
    MEDIA_TYPE,
    MISDIRECTED,
    OVERLOADED,
    UNAUTHORIZED,
    Refusal,
)

CLIENT_LEFT: Final = 499
"""Status in logs and metrics when the client disconnected before the response; it is never sent."""

RETRY_SECONDS: Final = 1
"""The ``Retry-After`` of a rejected request when the service is busy."""

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, version 00."""
_REASON_OF_KIND: Final = {
    MISDIRECTED: "host",
    INVALID_HTTP: "invalid",
    UNAUTHORIZED: "key",
    FORBIDDEN: "scope",
    OVERLOADED: "overload",
}
_FALLBACK: Final = b"gpumemnet-fallback"
"""Header of every response while another release answers in place of the registry's champion; its
value is that release."""
_NAMES_OF_HOSTS: Final = (b"host", b"origin")
_NOSNIFF: Final = (b"x-content-type-options", b"nosniff")

logger = logging.getLogger("gpumemnet.service")


ANY_KEY: Final = "any"
"""For paths that need a key with any scope."""


@dataclass(frozen=True, slots=True, eq=False)
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


_RULES: Final = (
    PathRule("/healthz", is_limited=False),
    PathRule("/readyz", is_limited=False),
    PathRule("/metrics", is_limited=False),
    PathRule("/"),
    PathRule("/docs"),
    PathRule("/openapi.json"),
    *(
        PathRule(f"/v1/{name}", "predict")
        for name in ("predict", "predict/batch", "batch-sizes", "gpus", "models")
    ),
    *(PathRule(path, "observe") for path in ("/v1/observations", "/v1/observations/summary")),
)
_EXACT: Final = {rule.name: rule for rule in _RULES}
_BELOW: Final = (
    ("/page/", PathRule("/page/{file}")),
    ("/docs/", PathRule("/docs/{file}")),
    ("/v1/observations", PathRule("/v1/observations/{rest}", "observe")),
    ("/v1/predictions/", PathRule("/v1/predictions/{prediction_id}", "predict")),
    ("/v1/", PathRule("/v1/{rest}", "predict")),
)
_OTHER: Final = PathRule("{other}", ANY_KEY)


def rule_of(path: str) -> PathRule:
    """The rules of ``path``, as the server has decoded it."""
    rule = _EXACT.get(path)
    if rule is not None:
        return rule
    for start, rule in _BELOW:
        if path.startswith(start):
            return rule
    return _OTHER


class Gate:
    """ASGI middleware.

    It sets ``request_id``, and ``key_name`` when a key was sent, in ``scope["state"]``.  Every
    response gets an ``X-Request-ID``, and a header that stops browsers from guessing its media
    type.

    Args:
        app: the application.
        keys: the API keys; ``None`` when no key is required.
        hosts: the hosts that requests may be addressed to; ``None`` for any.
        fallback: the release that answers in place of the registry's champion; ``None`` while the
            champion answers.
        max_concurrency: most requests in progress at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing | None = None,
        hosts: AllowedHosts | None = None,
        fallback: Callable[[], str | None] = lambda: None,
        max_concurrency: int = 256,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._fallback = fallback
        self._max_concurrency = max_concurrency
        self._in_work = 0
        self._metrics = RequestMetrics()
        self._id_start = secrets.token_hex(8)
        self._ids = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_seconds = perf_counter()
        rule = rule_of(scope["path"])
        presented: bytes | None = None
        given_id: bytes | None = None
        foreign_host: bytes | None = None
        trace_id = ""
        hosts = 0
        for name, value in scope["headers"]:
            if name == b"authorization":
                if value[:7].lower() == b"bearer ":
                    presented = value[7:].strip()
            elif name == b"x-api-key":
                presented = presented or value
            elif name == b"x-request-id":
                given_id = value
            elif name == b"traceparent":
                if found := _TRACE_PARENT.fullmatch(value):
                    trace_id = found[1].decode("ascii")
            elif name in _NAMES_OF_HOSTS:
                hosts += name == b"host"
                if self._hosts is not None and not self._hosts.allows(value):
                    foreign_host = value
        if given_id is not None and _REQUEST_ID.fullmatch(given_id):
            request_id = given_id.decode("ascii")
        else:
            request_id = f"{self._id_start}{next(self._ids):08x}"
        REQUEST_ID.set(request_id)
        id_header = (b"x-request-id", request_id.encode("ascii"))
        status = sent_bytes = 0

        async def send_on(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [
                    *message.get("headers", ()),
                    id_header,
                ]  # a new list: an application may send its own again
                if _NOSNIFF not in headers:
                    headers.append(_NOSNIFF)
                if (release := self._fallback()) is not None:
                    headers.append((_FALLBACK, release.encode()))
                message = {"type": "http.response.start", "status": status, "headers": headers}
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        key = (
            self._keys.find(presented) if self._keys is not None and presented is not None else None
        )
        is_counted = rule.is_limited
        if is_counted:
            self._in_work += 1
            IN_WORK.inc()
        try:
            refusal = None
            if hosts != 1 and scope["http_version"] == "1.1":  # RFC 9112, section 3.2
                refusal = Refusal(INVALID_HTTP, f"the request must name one Host, not {hosts}")
            elif (
                foreign_host is not None and is_counted
            ):  # health and metrics stay open: probes use the address of a container
                refusal = _misdirected(foreign_host)
            elif rule.scope is not None:
                refusal = self._refusal(rule, key, presented)
            if refusal is None and is_counted:
                if self._in_work > self._max_concurrency:
                    refusal = Refusal(
                        OVERLOADED, "too many requests are in progress: try again later", _RETRY
                    )
                else:
                    await asyncio.sleep(
                        0
                    )  # count the requests that arrived meanwhile before the work begins
            if refusal is not None:
                REFUSED[_REASON_OF_KIND[refusal.kind]].inc()
                await _refuse(send_on, refusal)
            else:
                state = scope.setdefault("state", {})
                state["request_id"] = request_id
                if key is not None:
                    state["key_name"] = key.name
                await self._app(scope, receive, send_on)
        except Exception as error:
            logger.error("a request failed: %s", type(error).__name__, exc_info=error)
            if status == 0:
                await _refuse(send_on, Refusal(INTERNAL_ERROR, _FAILURE.format(request_id)))
        except asyncio.CancelledError:  # the service stops, and its shutdown time is over
            if status:
                raise
            await _refuse(
                send_on, Refusal(OVERLOADED, "the service is stopping: try again", _RETRY)
            )
        finally:
            if is_counted:
                self._in_work -= 1
                IN_WORK.dec()
            status = status or CLIENT_LEFT
            if status == 413:
                REFUSED["large_body"].inc()
            seconds = perf_counter() - began_seconds
            self._metrics.count(rule.name, status, seconds)
            log_request(
                key="" if key is None else key.name,
                method=scope["method"],
                path=rule.name,
                status=status,
                seconds=seconds,
                sent_bytes=sent_bytes,
                trace_id=trace_id,
            )

    def _refusal(
        self, rule: PathRule, key: ApiKey | None, presented: bytes | None
    ) -> Refusal | None:
        """The reason to reject a request; ``None`` when it is allowed."""
        if self._keys is None or rule.scope is None:
            return None
        if key is None:
            reason = "the API key is unknown" if presented is not None else "an API key is required"
            return Refusal(
                UNAUTHORIZED,
                f"{reason}: send one as 'Authorization: Bearer KEY'",
                {"WWW-Authenticate": "Bearer"},
            )
        if rule.scope != ANY_KEY and rule.scope not in key.scopes:
            return Refusal(
                FORBIDDEN,
                f"the API key {key.name!r} does not allow {rule.scope!r}: {', '.join(sorted(key.scopes))}",
            )
        return None


def _misdirected(host: bytes) -> Refusal:
    return Refusal(
        MISDIRECTED,
        f"requests for or from {host[:100].decode('latin-1')!r} are not answered: use a name of this machine, such as localhost, "
        "or list the host in GPUMEMNET_ALLOWED_HOSTS",
    )


_RETRY: Final = {"Retry-After": str(RETRY_SECONDS)}
_FAILURE: Final = (
    "an unexpected error occurred; the cause is in the log of the service, at the request id {}"
)


async def _refuse(send: Send, refusal: Refusal) -> None:
    body = orjson.dumps(refusal.document())
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(body))]
    headers += [
        (name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()
    ]
    await send({"type": "http.response.start", "status": refusal.kind.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
