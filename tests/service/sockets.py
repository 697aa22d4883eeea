import socket
from urllib.parse import urlsplit


def connect(url: str) -> socket.socket:
    """A TCP connection to the service at ``url``, for requests that no HTTP client sends."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=300)
