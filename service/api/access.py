"""Who may ask, and how much at once: API keys, allowed hosts, and the one middleware around the
application.

*Keys.*  The settings hold only SHA-256 hashes, so they reveal no key.  A key is 256 random bits, so
a fast hash is enough: nobody can guess the key from it.  Slow hashes protect passwords, which people
choose.  ``gpumemnet keys new --name ci --scopes predict+observe`` makes a key.

*Hosts* protect a service without keys from the pages of other sites.  A page may let its name
resolve to 127.0.0.1, and its scripts then reach a service on the visitor's machine as if it were
their own site (DNS rebinding).  Such a request names the page's host in ``Host``.  A page may also
send a form without asking first; such a request names the page in ``Origin``.

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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import count
from time import perf_counter
from typing import Final

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumemnet.errors import FieldError, InvalidRequestError

from .monitoring import IN_WORK, REFUSALS, REQUEST_ID, RequestRecords
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

SCOPES: Final = ("predict", "observe")
"""The scopes of a key: request predictions, and report the observed memory of jobs."""

_KEY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_RULE: Final = (
    "must be name:scopes:hash, with scopes of "
    f"{', '.join(SCOPES)} joined by '+', and the key's SHA-256 in 64 hexadecimal digits (not the key itself)"
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key, without the key itself.

    Attributes:
        name: for the log.
        scopes: some of :data:`SCOPES`.
        digest: SHA-256 of the key.
    """

    name: str
    scopes: frozenset[str]
    digest: bytes


class KeyRing:
    """All configured API keys."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, other: KeyRing) -> bool:
        """Hold the keys of ``other`` from now on; returns whether these are different ones."""
        before, self._keys = self._keys, other._keys
        return before != self._keys

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that was presented, or ``None``.  Looking for its hash takes a time that tells
        nothing of the keys: nobody can choose the hash of a guess."""
        return self._keys.get(sha256(presented).digest())


def parse_key(text: str) -> ApiKey:
    """The key in one entry of the settings.

    Raises:
        ValueError: describes the expected entry; never repeats the entry, because it may hold a
            key.
    """
    parts = text.strip().split(":")
    if len(parts) != 3:
        raise ValueError(_RULE)
    name, scopes, digest = parts
    names = scopes.split("+")
    if not (_KEY_NAME.fullmatch(name) and set(names) <= set(SCOPES) and _SHA256.fullmatch(digest)):
        raise ValueError(_RULE)
    return ApiKey(name, frozenset(names), bytes.fromhex(digest))


def parse_keys(text: str) -> KeyRing:
    """The keys of a setting or a file: entries separated by commas or lines; ``#`` begins a
    comment.

    Raises:
        ValueError: names the invalid entry and its fault.
    """
    entries = [
        entry
        for line in text.splitlines()
        for entry in line.partition("#")[0].split(",")
        if entry.strip()
    ]
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, start=1):
        try:
            key = parse_key(entry)
        except ValueError as error:
            raise ValueError(f"has an entry that cannot be used: number {number} {error}") from None
        if key.name in {other.name for other in keys}:
            raise ValueError(
                f"has two keys of the name {key.name!r}: the log could not tell them apart"
            )
        twin = next((other.name for other in keys if other.digest == key.digest), None)
        if twin is not None:
            raise ValueError(
                f"has one key under two names, {twin!r} and {key.name!r}: give it one name with all its scopes"
            )
        keys.append(key)
    return KeyRing(keys)


def new_key(name: str, scopes: str) -> tuple[str, str]:
    """A new key, and its entry for the settings.

    Args:
        name: the key's owner.
        scopes: some of :data:`SCOPES`, joined by ``+``.

    Raises:
        InvalidRequestError: for an invalid name or an unknown scope.
    """
    key = secrets.token_urlsafe(32)
    entry = f"{name}:{scopes}:{sha256(key.encode()).hexdigest()}"
    try:
        parse_key(entry)
    except ValueError:
        reason = (
            f"--name must match {_KEY_NAME.pattern} and --scopes be some of {', '.join(SCOPES)}"
        )
        raise InvalidRequestError(reason) from None
    return key, entry


LOOPBACK: Final = "loopback"
"""Stands for every name and address of this machine alone."""
ANY: Final = "*"
"""Stands for every host."""

_HOST_NAME: Final = re.compile(
    r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*"
)


class AllowedHosts:
    """The hosts that a request may name in ``Host`` and ``Origin``.

    Args:
        hosts: names and IP addresses, :data:`LOOPBACK` among them for all of this machine alone.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(hosts)
        self.allows = lru_cache(1000)(self._allows)

    def _allows(self, value: bytes) -> bool:
        """Whether ``Host`` or ``Origin`` may have this value."""
        host = host_name(value.decode("latin-1").rpartition("://")[2])
        return host in self._hosts or (LOOPBACK in self._hosts and is_loopback_name(host))


def host_name(authority: str) -> str:
    """The host of ``host:port``, in lower case, without the brackets of an IPv6 address and the dot
    that may end a name."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return re.sub(r":[^:]*$", "", authority).lower().removesuffix(".")


def is_loopback_name(host: str) -> bool:
    """Whether ``host`` is this machine, and no resolver is asked for it (RFC 6761, section 6.3)."""
    address = _address(host)
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host.endswith(".localhost")


def parse_hosts(text: str) -> frozenset[str]:
    """The hosts of a setting, separated by commas.

    Raises:
        ValueError: names the entry that is no host.
    """
    hosts = set()
    for entry in filter(None, map(str.strip, text.lower().split(","))):
        host = entry.removeprefix("[").removesuffix("]").removesuffix(".")
        if host not in (ANY, LOOPBACK) and not _HOST_NAME.fullmatch(host) and not _address(host):
            raise ValueError(
                f"has an entry that is no host: {entry[:60]!r}; give names or addresses without ports"
            )
        hosts.add(host)
    return frozenset(hosts)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


CLIENT_LEFT: Final = 499
"""Status in logs and metrics when the client disconnected before the response; it is never sent."""
ANY_KEY: Final = "any"
"""For paths that need a key with any scope."""

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, version 00."""
_FALLBACK: Final = b"gpumemnet-fallback"
"""Header of every response while another release answers in place of the registry's champion; its
value is that release."""
_NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
_RETRY: Final = {"Retry-After": "1"}

logger = logging.getLogger("gpumemnet.service")


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
    if (rule := _EXACT.get(path)) is not None:
        return rule
    return next((rule for start, rule in _BELOW if path.startswith(start)), _OTHER)


class AccessControl:
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
        self._records = RequestRecords()
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
        if (release := self._fallback()) is not None:
            own_headers.append((_FALLBACK, release.encode()))
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

        key = (
            self._keys.find(presented) if self._keys is not None and presented is not None else None
        )
        if rule.is_limited:
            self._in_work += 1
            IN_WORK.inc()
        try:
            if len(hosts) != 1 and scope["http_version"] == "1.1":  # RFC 9112, section 3.2
                detail = f"the request must name one Host, not {len(hosts)}"
                raise Refusal(INVALID_HTTP, detail)
            if rule.is_limited:  # probes use the address of a container
                self._check_hosts(*hosts, *origins)
            if self._keys is not None and rule.scope is not None:
                _check_key(key, rule.scope, presented)
            if rule.is_limited:
                if self._in_work > self._max_concurrency:
                    detail = "too many requests are in progress: try again later"
                    raise Refusal(OVERLOADED, detail, _RETRY)
                # Count the requests that arrived meanwhile before the work begins.
                await asyncio.sleep(0)
            state = scope.setdefault("state", {})
            state["request_id"] = request_id
            if key is not None:
                state["key_name"] = key.name
            await self._app(scope, receive, send_on)
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
            stopping = Refusal(OVERLOADED, "the service is stopping: try again", _RETRY)
            await _send_problem(send_on, stopping, scope)
        finally:
            if rule.is_limited:
                self._in_work -= 1
                IN_WORK.dec()
            self._records.add(
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
            if self._hosts is not None and not self._hosts.allows(host):
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
        raise Refusal(UNAUTHORIZED, detail, {"WWW-Authenticate": "Bearer"})
    if scope != ANY_KEY and scope not in key.scopes:
        allowed = ", ".join(sorted(key.scopes))
        detail = f"the API key {key.name!r} does not allow {scope!r}: {allowed}"
        raise Refusal(FORBIDDEN, detail)


async def _send_problem(send: Send, error: FieldError | HTTPException, scope: Scope) -> None:
    document = problem_document(error, scope["method"], scope["path"])
    REFUSALS.labels(document["type"].rpartition(":")[2]).inc()
    body = orjson.dumps(document)
    given = error.headers or {} if isinstance(error, HTTPException) else {}
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", b"%d" % len(body)),
        *((name.lower().encode(), value.encode()) for name, value in given.items()),
    ]
    await send({"type": "http.response.start", "status": document["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})
