"""Measures the REST service over HTTP: latency at one connection, throughput at many, CPU time and
memory.

    python benchmarks/http_latency.py [--connections 32] [--rounds 3] [--mlserver
    .mlserver/bin/python]

The server has one core and the load comes from another.  The service runs as in production: it
checks keys, logs and counts every request, and stores every prediction.  The peers serve the same
models and do none of this.  They are FastAPI with pydantic models for request and answer, once as
``async def`` and once as ``def`` (in a thread pool), and MLServer with a runtime that calls the
same predictor.  MLServer needs an environment of its own:

    python -m venv .mlserver && .mlserver/bin/pip install mlserver==1.7.1 onnxruntime==1.31.1
    uvloop==0.21.0

Each round measures every server once; the table shows the median over the rounds.
"""

import argparse
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import psutil
from http_load import Request, run_load

from service.api.examples import EXAMPLE_JOBS

ROOT = Path(__file__).parents[1]
START_SECONDS = 300
BATCH_JOBS = 1000
FAMILY = "mlp"
KEY = "a-key-for-the-benchmark-and-nothing-else"


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one server in one round; times are in milliseconds, except CPU time."""

    single_p50: float
    single_p99: float
    single_cpu_microseconds: float
    per_second: float
    parallel_p50: float
    parallel_p99: float
    cpu_microseconds: float
    resident_mib: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server to measure: the command that starts it on a port, its readiness check, and a request
    for one prediction."""

    command: Sequence[str]
    ready_path: str
    request: Request
    environment: Mapping[str, str] = field(default_factory=dict)


def candidates(mlserver: str | None) -> dict[str, Candidate]:
    """Return the service and its peers by name; ``{port}`` and ``{folder}`` in commands and
    variables are placeholders."""
    job = EXAMPLE_JOBS[FAMILY]
    body = json.dumps({"job": job}).encode()
    tensor = json.dumps(
        {"inputs": [{"name": "job", "shape": [1], "datatype": "BYTES", "data": [json.dumps(job)]}]}
    ).encode()
    header = f"Authorization: Bearer {KEY}\r\n"
    own = (sys.executable, "-m", "service", "--port", "{port}")
    settings = {
        "GPUMEMNET_API_KEYS": f"benchmark:predict:{sha256(KEY.encode()).hexdigest()}",
        "GPUMEMNET_DATABASE_URL": "sqlite:///{folder}/observations.sqlite3",
    }
    peers = str(ROOT / "benchmarks" / "http_peers.py")
    servers = {
        "gpumemnet service": Candidate(
            own, "/readyz", Request("/v1/predict", body, header), settings
        ),
        "FastAPI and onnxruntime, minimal": Candidate(
            (sys.executable, peers, "minimal", "{port}"),
            "/openapi.json",
            Request("/v1/predict", body),
        ),
        "FastAPI, async def, pydantic": Candidate(
            (sys.executable, peers, "async", "{port}"),
            "/openapi.json",
            Request("/v1/predict", body),
        ),
        "FastAPI, def, pydantic": Candidate(
            (sys.executable, peers, "def", "{port}"), "/openapi.json", Request("/v1/predict", body)
        ),
    }
    if mlserver is not None:
        for name, kind in (
            ("MLServer 1.7.1, as it installs itself", "default"),
            ("MLServer 1.7.1, all extras off", "bare"),
        ):
            servers[name] = Candidate(
                (
                    mlserver,
                    str(ROOT / "benchmarks" / "mlserver_peer" / "serve.py"),
                    kind,
                    "{port}",
                    "{folder}",
                ),
                "/v2/models/gpumemnet/ready",
                Request("/v2/models/gpumemnet/infer", tensor),
                {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/integrations/mlserver"},
            )
    return servers


@contextmanager
def running(candidate: Candidate, core: int) -> Iterator[tuple[int, psutil.Process, float]]:
    """Run a server in a child process on one core; yield its port, its process, and the seconds
    until it was ready."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        port = _free_port()
        command = [part.format(port=port, folder=folder) for part in candidate.command]
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")
        }
        settings = {
            name: value.format(folder=folder) for name, value in candidate.environment.items()
        }
        started = time.perf_counter()
        process = psutil.Popen(command, stdout=log, stderr=log, env=clean | settings, cwd=ROOT)
        try:
            process.cpu_affinity([core])  # child processes inherit the affinity
            while not _answers(f"http://127.0.0.1:{port}{candidate.ready_path}"):
                if process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                    log.seek(0)
                    raise SystemExit(
                        f"the server did not start: {' '.join(command)}\n{log.read()[-2000:]}"
                    )
                time.sleep(0.02)
            yield port, process, time.perf_counter() - started
        finally:
            if process.is_running():
                process.terminate()
            process.wait(timeout=30)


def measure(
    port: int, process: psutil.Process, request: Request, connections: int, requests: int
) -> Figures:
    """Measure one server for one round."""
    run_load(port, request, 1, 300)
    before = _cpu_seconds(process)
    single, _ = run_load(port, request, 1, requests // 4)
    single_cpu_seconds = (_cpu_seconds(process) - before) / len(single)
    before = _cpu_seconds(process)
    parallel, elapsed = run_load(port, request, connections, requests)
    return Figures(
        single_p50=percentile(single, 50) * 1e3,
        single_p99=percentile(single, 99) * 1e3,
        single_cpu_microseconds=single_cpu_seconds * 1e6,
        per_second=len(parallel) / elapsed,
        parallel_p50=percentile(parallel, 50) * 1e3,
        parallel_p99=percentile(parallel, 99) * 1e3,
        cpu_microseconds=(_cpu_seconds(process) - before) / len(parallel) * 1e6,
        resident_mib=sum(one.memory_info().rss for one in _with_children(process)) / 2**20,
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def batch_of_different_jobs() -> bytes:
    """Return a batch of jobs that differ in widths and batch sizes."""
    template = EXAMPLE_JOBS[FAMILY]
    jobs = []
    for number in range(BATCH_JOBS):
        width, batch_size = 256 + number, 16 + number % 200
        first, *rest = template["layers"]
        layer = {**first, "activations": width, "parameters": width * 3073}
        jobs.append({**template, "batch_size": batch_size, "layers": [layer, *rest]})
    return json.dumps({"jobs": jobs}).encode()


def _cpu_seconds(process: psutil.Process) -> float:
    times = [one.cpu_times() for one in _with_children(process)]
    return sum(one.user + one.system for one in times)


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument(
        "--requests", type=int, default=10_000, help="per server and round at that many connections"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mlserver", help="interpreter of an environment with MLServer")
    parser.add_argument("--only", help="servers whose name matches this regular expression")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    *_, server_core, load_core = [min(os.sched_getaffinity(0)), *sorted(os.sched_getaffinity(0))][
        -2:
    ]
    os.sched_setaffinity(0, {load_core})

    servers = {
        name: server
        for name, server in candidates(arguments.mlserver).items()
        if re.search(arguments.only or "", name)
    }
    rounds: dict[str, list[Figures]] = {name: [] for name in servers}
    starts, batches = [], []
    for _ in range(arguments.rounds):
        for name, server in servers.items():
            with running(server, server_core) as (port, process, start_seconds):
                rounds[name].append(
                    measure(
                        port, process, server.request, arguments.connections, arguments.requests
                    )
                )
                if name == "gpumemnet service":
                    starts.append(start_seconds)
                    batch = Request(
                        "/v1/predict/batch", batch_of_different_jobs(), server.request.headers
                    )
                    batches += run_load(port, batch, 1, 30)[0]

    print(
        f"| server | 1 connection: p50 / p99 ms | CPU µs per request | {arguments.connections} connections: req/s | p50 / p99 ms "
        "| CPU µs per request | resident MiB |\n|---|---|---|---|---|---|---|"
    )
    for name, figures in rounds.items():
        median = {
            entry: statistics.median(getattr(figure, entry) for figure in figures)
            for entry in Figures.__slots__
        }
        print(
            f"| {name} | {median['single_p50']:.2f} / {median['single_p99']:.2f} "
            f"| {median['single_cpu_microseconds']:.0f} | {median['per_second']:,.0f} "
            f"| {median['parallel_p50']:.1f} / {median['parallel_p99']:.1f} | {median['cpu_microseconds']:.0f} "
            f"| {median['resident_mib']:.0f} |"
        )
    print(f"\nA job of {len(EXAMPLE_JOBS[FAMILY]['layers'])} layers.")
    if starts:
        print(f"Start until it is ready: {statistics.median(starts):.2f} s.")
        print(
            f"A batch of {BATCH_JOBS:,} different jobs: {statistics.median(batches) * 1e3:.1f} ms (median)."
        )
    if arguments.mlserver is None:
        print("MLServer was not measured: see --help.")
    if server_core == load_core:
        print("There is only one core, which server and load shared.")


if __name__ == "__main__":
    main()
