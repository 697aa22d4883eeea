"""The rate limit: a token bucket for each client, and a bound on the number of clients that are
stored.

A bucket holds up to ``burst`` tokens and gains ``per_second`` a second; a request takes one.  Only
the time at which a bucket would be full again is kept, one number per client (the "generic cell
rate algorithm", ITU-T I.371).
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address
from typing import Final

MAX_CLIENTS: Final = 10_000
"""Most clients stored in one worker; the least recently seen is removed first, and starts again
with a full bucket."""
_IPV6_SITE: Final = ~((1 << 64) - 1)


class RateLimit:
    """The token buckets of one worker.

    Args:
        per_second: tokens that a bucket gains.
        burst: tokens that it holds, at least 1.
        max_clients: most buckets that are stored.
    """

    def __init__(self, per_second: float, burst: int, max_clients: int = MAX_CLIENTS) -> None:
        self._seconds_per_token = 1 / per_second
        self._depth_seconds = burst / per_second
        self._max_clients = max_clients
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def wait_seconds(self, client: str, now_seconds: float) -> float:
        """Take a token of ``client``; returns 0.0, or the seconds until there is one."""
        full_at = self._full_at.get(client, now_seconds)
        if full_at < now_seconds:
            full_at = now_seconds
        full_at += self._seconds_per_token
        # a tolerance far below a token: rounding would otherwise refuse the last token of a burst
        excess = full_at - now_seconds - self._depth_seconds
        if excess > self._seconds_per_token * 1e-6:
            return excess
        self._full_at[client] = full_at
        self._full_at.move_to_end(client)
        if len(self._full_at) > self._max_clients:
            self._full_at.popitem(last=False)
        return 0.0


def client_of_address(host: str) -> str:
    """The client at an address: an IPv4 address, or an IPv6 site, which has 2**64 addresses."""
    if ":" not in host:
        return host
    try:
        return str(IPv6Address(int(IPv6Address(host)) & _IPV6_SITE))
    except ValueError:
        return host
