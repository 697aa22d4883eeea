"""Who may ask: API keys and allowed hosts.

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
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address
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


@dataclass(frozen=True)
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


def parse_keys(text: str) -> dict[bytes, ApiKey]:
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
            keys.append(parse_key(entry))
        except ValueError as error:
            raise ValueError(f"has an entry that cannot be used: number {number} {error}") from None
    if min(len({key.name for key in keys}), len({key.digest for key in keys})) < len(keys):
        raise ValueError("has two keys of one name, or one key under two names")
    return {key.digest: key for key in keys}


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


@lru_cache(1000)
def allows(hosts: frozenset[str], value: bytes) -> bool:
    """Whether ``Host`` or ``Origin`` may have this value.

    Args:
        hosts: allowed names and IP addresses; :data:`LOOPBACK` stands for all of this machine
            alone, :data:`ANY` for any.
        value: of the header.
    """
    host = host_name(value.decode("latin-1").rpartition("://")[2])
    return not hosts.isdisjoint((host, ANY)) or (LOOPBACK in hosts and is_loopback_name(host))


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
