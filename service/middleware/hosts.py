"""The hosts that requests may be addressed to: protects a service without keys from the pages of
other sites.

A page may let its name resolve to 127.0.0.1, and its scripts then reach a service on the visitor's
machine as if it were their own site (DNS rebinding).  Such a request names the page's host in
``Host``.  A page may also send a form without asking first; such a request names the page in
``Origin``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

LOOPBACK: Final = "loopback"
"""Stands for every name and address of this machine alone."""
ANY: Final = "*"
"""Stands for every host."""

_MAX_KNOWN: Final = 1000
_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


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
        if host not in (ANY, LOOPBACK) and not _NAME.fullmatch(host) and not _is_address(host):
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
