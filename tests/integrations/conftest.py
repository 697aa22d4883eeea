"""Services that fail, for adapters that must not."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

PREDICTION_ID = b"0192f3a4-1234-7abc-8def-0123456789ab"
BODIES = {
    "401": b'{"title": "Unauthorized", "status": 401, "detail": "no such key: \\u00e4\\"100%s\\""}',
    "422": b'{"title": "Unprocessable", "status": 422, "detail": "job.family: must be one of mlp"}',
    "429": b'{"detail": "too many requests"}',
    "500": b"Internal Server Error",
    "html": b"<html>It works!</html>",
    "other": b'{"hello": [1, 2, {"prediction_id": "x"}]}',
    "deep": b"[" * 5000,
    "list": b"[]",
    "number": b'{"prediction_id": "%s", "label_source": "traced", "reasons": [], "safe_bytes": 1e999, "expected_bytes": -1}'
    % PREDICTION_ID,
}


class Canned(BaseHTTPRequestHandler):
    """Answers with the status and the body that the path names, or not at all."""

    chosen = "hang"
    """What ``/chosen/…`` answers, for a client whose URL stays the same."""
    stopped = threading.Event()
    """Ends the requests that hang, when the tests are done."""

    def do_POST(self) -> None:
        kind = self.path.split("/")[1]
        kind = Canned.chosen if kind == "chosen" else kind
        if kind == "hang":
            Canned.stopped.wait()
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(int(kind) if kind.isdigit() else 200)
        self.send_header("Content-Length", str(len(BODIES[kind])))
        self.end_headers()
        self.wfile.write(BODIES[kind])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Chooses what ``/chosen/…`` answers."""
    return lambda kind: monkeypatch.setattr(Canned, "chosen", kind)


@pytest.fixture(scope="session")
def canned() -> Iterator[str]:
    """URL of a server that answers ``/401/…`` with a 401, ``/html/…`` with a page, and ``/hang/…``
    never."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Canned.stopped.set()
    server.shutdown()
    thread.join()
    server.server_close()
