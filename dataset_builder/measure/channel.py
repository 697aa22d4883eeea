"""Messages between the campaign, the fork server and the measuring children: one JSON object per
packet.

Unix sockets of type ``SOCK_SEQPACKET`` keep packet boundaries.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, Final

MAX_PACKET_BYTES: Final = 2**17


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message; raises ``OSError`` when the other end is gone."""
    end.sendall(encode(message))


def receive(end: socket.socket) -> dict[str, Any] | None:
    """The next message, or ``None`` when the other end is gone."""
    try:
        packet = end.recv(MAX_PACKET_BYTES)
    except ConnectionError:
        return None
    return decode(packet) if packet else None


def encode(message: Mapping[str, Any]) -> bytes:
    """The packet of one message."""
    return json.dumps(message).encode()


def decode(packet: bytes) -> dict[str, Any]:
    """The message of one packet."""
    message: dict[str, Any] = json.loads(packet)
    return message
