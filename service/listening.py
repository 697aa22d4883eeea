"""The listening socket of the service; its workers share it."""

from __future__ import annotations

import socket
from typing import Final

from .settings import SettingsError

BACKLOG: Final = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        SettingsError: when the address is not one of this machine, or is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another with --host and --port"
        ) from None


def address_of(listener: socket.socket) -> str:
    """The start of the URL that clients use."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
