import socket
from urllib.parse import urlsplit


def connect(url: str) -> socket.socket:
    """A TCP connection to the service at ``url``, for requests that no HTTP client sends."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=300)


def post_head(length: int, fields: str = "", path: str = "/v1/predict") -> bytes:
    """The head of a request whose body has ``length`` bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{fields}\r\n"
    ).encode()
