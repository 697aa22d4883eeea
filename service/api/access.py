"""Who may ask: API keys, and the hosts that requests may be addressed to.

*Keys.*  The settings hold only SHA-256 hashes, so they reveal no key.  A key is 256 random bits, so
a fast hash is enough: nobody can guess the key from it.  Slow hashes protect passwords, which people
choose.  ``gpumemnet keys new --name ci --scopes predict+observe`` makes a key.

*Hosts* protect a service without keys from the pages of other sites.  A page may let its name
resolve to 127.0.0.1, and its scripts then reach a service on the visitor's machine as if it were
their own site (DNS rebinding).  Such a request names the page's host in ``Host``.  A page may also
send a form without asking first; such a request names the page in ``Origin``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import Final

from gpumemnet.errors import InvalidRequestError

SCOPES: Final = ("predict", "observe")
"""The scopes of a key: request predictions, and report the observed memory of jobs."""

_KEY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_RULE: Final = (
    "must be name:scopes:hash, with scopes of "
    f"{', '.join(SCOPES)} joined by '+', and the key's SHA-256 in 64 hexadecimal digits (not the key itself)"
)
_MAX_KEY_BYTES: Final = 512


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
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, other: KeyRing) -> bool:
        """Hold the keys of ``other`` from now on; returns whether these are different ones."""
        before, self._keys = self._keys, other._keys
        return before != self._keys

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that was presented, or ``None``; its run time reveals nothing about the keys."""
        if len(presented) > _MAX_KEY_BYTES:
            return None
        digest = sha256(presented).digest()
        found = None
        for key in self._keys:
            if compare_digest(digest, key.digest):
                found = key
        return found


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

_MAX_KNOWN: Final = 1000
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
        self._known: dict[bytes, bool] = {}

    def allows(self, value: bytes) -> bool:
        """Whether ``Host`` or ``Origin`` may have this value."""
        known = self._known.get(value)
        if known is None:
            known = self._is_allowed(value.decode("latin-1"))
            if len(self._known) < _MAX_KNOWN:
                self._known[value] = known
        return known

    def _is_allowed(self, value: str) -> bool:
        host = host_name(value.rpartition("://")[2])
        return host in self._hosts or (LOOPBACK in self._hosts and is_loopback_name(host))


def host_name(authority: str) -> str:
    """The host of ``host:port``, in lower case, without the brackets of an IPv6 address and the dot
    that may end a name."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return (
        authority.rpartition(":")[0].lower().removesuffix(".")
        if ":" in authority
        else authority.lower().removesuffix(".")
    )


def is_loopback_name(host: str) -> bool:
    """Whether ``host`` is this machine, and no resolver is asked for it (RFC 6761, section 6.3)."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def parse_hosts(text: str) -> frozenset[str]:
    """The hosts of a setting, separated by commas.

    Raises:
        ValueError: names the entry that is no host.
    """
    hosts = set()
    for entry in text.split(","):
        host = entry.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")
        if not host:
            continue
        if host not in (ANY, LOOPBACK) and not _HOST_NAME.fullmatch(host) and not _is_address(host):
            raise ValueError(
                f"has an entry that is no host: {entry.strip()[:60]!r}; give names or addresses without ports"
            )
        hosts.add(host)
    return frozenset(hosts)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
