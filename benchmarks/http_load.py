"""Generates load on an HTTP server from one core: one request, repeated over any number of
connections."""

import asyncio
import re
import time
from dataclasses import dataclass

import uvloop


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its path, headers and body."""

    path: str
    body: bytes
    headers: str = ""

    def encoded(self) -> bytes:
        """Return the request as bytes, head and body."""
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{self.headers}"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


class Connection(asyncio.Protocol):
    """Sends one request repeatedly, each time after the previous response is complete."""

    def __init__(
        self, request: bytes, count: int, seconds: list[float], done: asyncio.Future[None]
    ) -> None:
        self.request, self.remaining, self.seconds, self.done = request, count, seconds, done
        self.received = bytearray()
        self.whole_bytes = 0  # length of head and body, known after the head has arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self.transport = transport
        self.send()

    def send(self) -> None:
        """Send the request once more."""
        self.started = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Collect the response; when it is complete, send the request again."""
        self.received += data
        if not self.whole_bytes:
            end = self.received.find(b"\r\n\r\n")
            if end < 0:
                return
            self.whole_bytes = (
                end + 4 + int(re.search(rb"(?i)content-length: (\d+)", self.received[:end])[1])
            )
        if len(self.received) < self.whole_bytes:
            return
        self.seconds.append(time.perf_counter() - self.started)
        self.remaining -= 1
        if not self.received.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self.received.decode()))
        elif self.remaining:
            self.received, self.whole_bytes = bytearray(), 0
            self.send()
        else:
            self.transport.close()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail if the server closes the connection before all responses have arrived."""
        if not self.done.done():
            self.done.set_exception(error or RuntimeError("the server closed the connection"))


def run_load(
    port: int, request: Request, connections: int, requests: int
) -> tuple[list[float], float]:
    """Return the sorted latencies of all requests and the total time, in seconds, measured with the
    fastest event loop."""

    async def load() -> tuple[list[float], float]:
        loop = asyncio.get_running_loop()
        seconds: list[float] = []
        finished = [loop.create_future() for _ in range(connections)]
        started = time.perf_counter()
        for done in finished:
            await loop.create_connection(
                lambda done=done: Connection(
                    request.encoded(), requests // connections, seconds, done
                ),
                "127.0.0.1",
                port,
            )
        await asyncio.gather(*finished)
        return sorted(seconds), time.perf_counter() - started

    return uvloop.run(load())
