"""Measures the REST service over HTTP: latency at one connection, throughput at many, CPU time and memory.

    python benchmarks/http_latency.py [--connections 32] [--rounds 3]

The server has one core and the load comes from another.  Beside the service stand two peers in front of the same model, which
differ from it in the route alone: FastAPI's usual way, the request read and the answer checked by pydantic, once as ``async def``
and once as ``def`` (in a thread pool).  All three take turns in every round; the table shows the median over the rounds.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpumemnet.predictor import Predictor
from service.examples import EXAMPLE_JOBS

START_SECONDS = 60
BATCH_JOBS = 1000


@dataclass(frozen=True, slots=True)
class Figures:
    """What one round measured of one server; times in milliseconds but for the CPU's."""

    alone_p50: float
    alone_p99: float
    per_second: float
    together_p50: float
    together_p99: float
    cpu_microseconds: float
    resident_mib: float


@dataclass(frozen=True, slots=True)
class Server:
    """A server under measurement."""

    port: int
    pid: int
    start_seconds: float

    def cpu_seconds(self) -> float:
        """CPU time used so far."""
        columns = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(columns[11]) + int(columns[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        """Resident memory now."""
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())[1]) / 1024


class Connection(asyncio.Protocol):
    """Sends the same request again and again, the next one when the answer to the last is complete."""

    def __init__(self, request: bytes, count: int, seconds: list[float], done: asyncio.Future[None]) -> None:
        self.request, self.remaining, self.seconds, self.done = request, count, seconds, done
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = transport
        self.send()

    def send(self) -> None:
        """Ask once more."""
        self.started = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Wait for the whole answer, then ask again."""
        self.received += data
        head, end, content = self.received.partition(b"\r\n\r\n")
        if not end or len(content) < int(re.search(rb"(?i)content-length: (\d+)", head)[1]):
            return
        self.seconds.append(time.perf_counter() - self.started)
        self.remaining -= 1
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self.received.decode()))
        elif self.remaining:
            self.received = b""
            self.send()
        else:
            self.transport.close()
            self.done.set_result(None)


async def load(port: int, path: str, body: bytes, connections: int, requests: int) -> tuple[list[float], float]:
    """Sorted seconds of every request, and the seconds of the whole."""
    head = f"POST {path} HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    seconds: list[float] = []
    finished = [loop.create_future() for _ in range(connections)]
    started = time.perf_counter()
    for done in finished:
        await loop.create_connection(
            lambda done=done: Connection(head.encode() + body, requests // connections, seconds, done), "127.0.0.1", port
        )
    await asyncio.gather(*finished)
    return sorted(seconds), time.perf_counter() - started


def run_load(port: int, path: str, body: bytes, connections: int, requests: int) -> tuple[list[float], float]:
    """:func:`load` on the event loop that costs the least."""
    import uvloop

    return uvloop.run(load(port, path, body, connections, requests))


def measure(server: Server, body: bytes, connections: int, requests: int) -> Figures:
    """One round."""
    run_load(server.port, "/v1/predict", body, 1, 300)
    alone, _ = run_load(server.port, "/v1/predict", body, 1, requests // 4)
    before = server.cpu_seconds()
    together, elapsed = run_load(server.port, "/v1/predict", body, connections, requests)
    return Figures(
        alone_p50=percentile(alone, 50) * 1e3,
        alone_p99=percentile(alone, 99) * 1e3,
        per_second=len(together) / elapsed,
        together_p50=percentile(together, 50) * 1e3,
        together_p99=percentile(together, 99) * 1e3,
        cpu_microseconds=(server.cpu_seconds() - before) / len(together) * 1e6,
        resident_mib=server.resident_mib(),
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


@contextmanager
def running(command: Sequence[str], core: int) -> Iterator[Server]:
    """A server in a child process that has one core."""
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], stderr=log)
        try:
            os.sched_setaffinity(process.pid, {core})
            while process.poll() is None and time.perf_counter() - started < START_SECONDS:
                log.seek(0)
                if found := re.search(r"listening on (http://\S+)", log.read()):
                    yield Server(urlsplit(found[1]).port, process.pid, time.perf_counter() - started)
                    return
                time.sleep(0.01)
            log.seek(0)
            raise SystemExit(f"the server did not start:\n{log.read()}")
        finally:
            process.terminate()
            process.wait(timeout=30)


def serve_peer(kind: str) -> None:
    """The same answers in FastAPI's usual way."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel, ConfigDict

    from gpumemnet.job_json import job_from_dict
    from service.answers import Answerer
    from service.schemas import Prediction

    class LayerModel(BaseModel):
        kind: str
        activations: int
        parameters: int = 0

    class JobModel(BaseModel):
        model_config = ConfigDict(extra="forbid")
        family: str
        batch_size: int
        input_elements: int
        optimizer: str
        precision: str
        layers: list[LayerModel] = []
        total_activations: int | None = None
        total_parameters: int | None = None
        activation_function: str | None = None
        sequence_length: int | None = None

    class Question(BaseModel):
        job: JobModel
        coverage: float = 0.99

    predictor = Predictor.default()
    answerer = Answerer(predictor, BATCH_JOBS)
    models = {model["name"]: model for model in json.loads(answerer.models())["models"]}
    app = FastAPI()

    def predict(question: Question) -> Prediction:
        job = job_from_dict(question.job.model_dump())
        estimate = predictor.predict(job, coverage=question.coverage)
        lower_bytes, upper_bytes = estimate.bin_bounds_bytes
        mib = 2**20
        return Prediction(
            bin={
                "index": estimate.bin_index,
                "lower_bytes": lower_bytes,
                "upper_bytes": upper_bytes,
                "lower_mib": lower_bytes // mib,
                "upper_mib": upper_bytes and upper_bytes // mib,
                "probability": float(estimate.probabilities.max()),
            },
            expected_bytes=estimate.expected_bytes,
            expected_mib=-(-estimate.expected_bytes // mib),
            safe_bytes=estimate.safe_bytes,
            safe_mib=estimate.safe_bytes and -(-estimate.safe_bytes // mib),
            coverage=estimate.coverage,
            in_support=estimate.in_support,
            reasons=list(estimate.reasons),
            bins={
                "name": estimate.bins.name,
                "width_bytes": estimate.bins.width_bytes,
                "width_mib": estimate.bins.width_bytes // mib,
                "count": estimate.bins.count,
                "probabilities": estimate.probabilities.tolist(),
            },
            gpu=estimate.gpu,
            label_source=estimate.label_source,
            model={
                name: models[estimate.estimator][name]
                for name in ("name", "version", "sha256", "family", "encoder", "training_data")
            },
        )

    if kind == "async":

        @app.post("/v1/predict")
        async def predict_on_the_loop(question: Question) -> Prediction:
            return predict(question)
    else:
        app.post("/v1/predict")(predict)

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=10_000, help="per server and round at that many connections")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", choices=["async", "def"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.peer:
        serve_peer(arguments.peer)
        return
    *_, server_core, load_core = [min(os.sched_getaffinity(0)), *sorted(os.sched_getaffinity(0))][-2:]
    os.sched_setaffinity(0, {load_core})

    family = Predictor.default().bundles[0].card.family
    body = json.dumps({"job": EXAMPLE_JOBS[family]}).encode()
    commands = {
        "gpumemnet service": ["-m", "service", "--port", "0"],
        "FastAPI, async def, pydantic": [__file__, "--peer", "async"],
        "FastAPI, def, pydantic": [__file__, "--peer", "def"],
    }
    rounds: dict[str, list[Figures]] = {name: [] for name in commands}
    starts, batches = [], []
    for _ in range(arguments.rounds):
        for name, command in commands.items():
            with running(command, server_core) as server:
                rounds[name].append(measure(server, body, arguments.connections, arguments.requests))
                if name == "gpumemnet service":
                    starts.append(server.start_seconds)
                    batch = json.dumps({"jobs": [EXAMPLE_JOBS[family]] * BATCH_JOBS}).encode()
                    batches += run_load(server.port, "/v1/predict/batch", batch, 1, 20)[0]

    print(
        f"| server | 1 connection: p50 / p99 ms | {arguments.connections} connections: req/s | p50 / p99 ms "
        "| CPU µs per request | resident MiB |\n|---|---|---|---|---|---|"
    )
    for name, figures in rounds.items():
        median = {field: statistics.median(getattr(figure, field) for figure in figures) for field in Figures.__slots__}
        print(
            f"| {name} | {median['alone_p50']:.2f} / {median['alone_p99']:.2f} | {median['per_second']:,.0f} "
            f"| {median['together_p50']:.1f} / {median['together_p99']:.1f} | {median['cpu_microseconds']:.0f} "
            f"| {median['resident_mib']:.0f} |"
        )
    layers = len(EXAMPLE_JOBS[family]["layers"])
    print(f"\nA job of {layers} layers, {len(body)} bytes.  Start until it listens: {statistics.median(starts):.2f} s.")
    print(f"A batch of {BATCH_JOBS:,} such jobs: {statistics.median(batches) * 1e3:.0f} ms (median).")
    if server_core == load_core:
        print("There is one core only: server and load shared it.")


if __name__ == "__main__":
    main()
