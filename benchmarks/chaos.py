"""Mixed load on a service of two workers while models are swapped, workers killed, and clients
misbehave.

    python benchmarks/chaos.py [--seconds 1800] [--seed 0] [--kill-every 10]

For the whole time: predictions, batches, searches, bad bodies, floods of observations, the champion
changed every two seconds, and a worker killed with SIGKILL every few seconds.  Hostile strangers are
the business of the proxy (tests/deploy/test_proxy.py).  Prints a summary as JSON, and ends with 1
when one of these rules is broken:

* The only 5xx are deliberate 503s with Retry-After.
* Every observation that was accepted with a 201 is in the database after the service has stopped.
* The only connections that are cut are those of a killed worker.
* Memory is steady.  From the middle third of the run to the last, the first quartile of the
  longest-lived worker's memory grows by at most a tenth.  Runs of less than a minute are not
  checked: they are all start-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil

from gpumemnet.predict.bundle import load_bundle, save_bundle, shipped_bundles
from gpumemnet.site.releases import Registry
from service.api.examples import EXAMPLE_JOBS

ROOT = Path(__file__).parents[1]
KEYS = {scope: f"{scope}-key-of-the-chaos-run" for scope in ("predict", "observe")}
START_SECONDS = 300
"""Most seconds until the service is ready, also on a busy machine."""


@dataclass
class Run:
    """State that the clients share: settings, and what they have recorded so far."""

    url: str
    random: random.Random
    ends_at: float
    statuses: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    accepted: set[str] = field(default_factory=set)
    cut_connections: int = 0
    kills: int = 0
    swaps: int = 0
    resident_mib: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the time of the run is over."""
        return time.monotonic() > self.ends_at


async def ask(
    run: Run, client: httpx.AsyncClient, kind: str, method: str, path: str, **request: Any
) -> httpx.Response | None:
    """Send one request; return ``None`` if the connection was cut, as after the kill of a
    worker."""
    try:
        answer = await client.request(method, path, **request)
    except httpx.TransportError:
        run.cut_connections += 1
        await asyncio.sleep(0.05)
        return None
    run.statuses[f"{kind} {answer.status_code}"] += 1
    if answer.status_code >= 500 and not (
        answer.status_code == 503 and "retry-after" in answer.headers
    ):
        run.broken.append(f"{kind}: {answer.status_code} {answer.text[:300]}")
    if "Traceback" in answer.text:
        run.broken.append(f"{kind}: a traceback reached the client")
    return answer


async def predict(run: Run) -> None:
    """Send valid requests by every protocol."""
    headers = {"Authorization": f"Bearer {KEYS['predict']}"}
    async with httpx.AsyncClient(base_url=run.url, headers=headers, timeout=30) as client:
        while not run.is_over:
            job = {
                **run.random.choice(list(EXAMPLE_JOBS.values())),
                "batch_size": run.random.randint(1, 512),
            }
            kind = run.random.choice(
                [
                    "predict",
                    "predict",
                    "predict",
                    "fits",
                    "text",
                    "batch",
                    "batch-sizes",
                    "get",
                ]
            )
            if kind == "batch":
                answer = await ask(
                    run,
                    client,
                    kind,
                    "POST",
                    "/v1/predict/batch",
                    json={"jobs": [job] * run.random.randint(1, 300)},
                )
            elif kind == "batch-sizes":
                answer = await ask(
                    run, client, kind, "POST", "/v1/batch-sizes", json={"job": job, "gpu": "A100"}
                )
            elif kind == "get":
                path = run.random.choice(
                    ["/v1/models", "/v1/gpus", "/readyz", "/metrics", "/", "/openapi.json"]
                )
                answer = await ask(run, client, kind, "GET", path)
            else:
                body = {"job": job, **({"fits": True} if kind == "fits" else {})}
                accept = {"Accept": "text/plain"} if kind == "text" else {}
                answer = await ask(
                    run, client, kind, "POST", "/v1/predict", json=body, headers=accept
                )
            if answer is not None and answer.status_code not in (200, 503) and kind != "text":
                run.broken.append(f"{kind}: {answer.status_code} {answer.text[:300]}")


async def misbehave(run: Run) -> None:
    """Send invalid bodies, unknown paths and wrong keys, and drop connections during a request."""
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"job": 1}',
        b'{"job": {"family": "mlp"}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"jobs": {}}',
    ]
    async with httpx.AsyncClient(base_url=run.url, timeout=30) as client:
        while not run.is_over:
            key = run.random.choice([*KEYS.values(), "wrong"])
            path = run.random.choice(
                [
                    "/v1/predict",
                    "/v1/predict/batch",
                    "/v1/observations",
                    "/nothing",
                ]
            )
            headers = {
                "Authorization": f"Bearer {key}",
                "Content-Type": run.random.choice(["application/json", "text/plain"]),
            }
            answer = await ask(
                run, client, "bad", "POST", path, content=run.random.choice(bodies), headers=headers
            )
            if answer is not None and answer.status_code < 400:
                run.broken.append(f"bad input was answered with {answer.status_code} at {path}")
            if run.random.random() < 0.2:
                host, port = run.url.removeprefix("http://").split(":")
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.write(
                        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
                    )
                    await asyncio.sleep(0.02)
                    writer.close()
                except OSError:
                    run.cut_connections += 1


async def observe(run: Run) -> None:
    """Send bursts of observations, each with a different idempotency key; send those without an
    answer again."""
    headers = {"Authorization": f"Bearer {KEYS['observe']}"}
    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(
        base_url=run.url, headers=headers, timeout=30, limits=limits
    ) as client:
        number = 0
        while not run.is_over:
            burst = [f"chaos-{number + i}" for i in range(run.random.choice([1, 5, 60]))]
            number += len(burst)
            await asyncio.gather(*(observe_one(run, client, key) for key in burst))
            await asyncio.sleep(0.02)


async def observe_one(run: Run, client: httpx.AsyncClient, key: str) -> None:
    """Send one observation until it is accepted, or rejected because the queue is full."""
    body = {
        "job": EXAMPLE_JOBS["mlp"],
        "gpu": "A100",
        "peak_mib": 2000 + int(key.partition("-")[2]) % 500,
        "source": "nvml_process",
        "idempotency_key": key,
    }
    for _ in range(5):
        answer = await ask(run, client, "observe", "POST", "/v1/observations", json=body)
        if answer is None:
            continue
        if answer.status_code in (200, 201):
            run.accepted.add(key)
        elif answer.status_code != 503:
            run.broken.append(f"observe: {answer.status_code} {answer.text[:300]}")
        return


async def swap(run: Run, registry: Path, releases: list[str]) -> None:
    """Change the champion every two seconds."""
    while not run.is_over:
        release = releases[run.swaps % len(releases)]
        Registry(registry).set_champion(release, by="chaos", reason="chaos")
        run.swaps += 1
        await asyncio.sleep(2)


async def kill(run: Run, supervisor: psutil.Process, every_seconds: float) -> None:
    """Kill the newest worker with SIGKILL at intervals, but never the first, whose memory is
    measured over the whole run."""
    while not run.is_over:
        pause_seconds = every_seconds * run.random.uniform(0.5, 1.5)
        await asyncio.sleep(min(pause_seconds, max(0.0, run.ends_at - time.monotonic())))
        workers = sorted(supervisor.children(), key=lambda child: child.create_time())
        if len(workers) > 1 and not run.is_over:
            os.kill(workers[-1].pid, signal.SIGKILL)
            run.kills += 1


async def follow_memory(run: Run, supervisor: psutil.Process) -> None:
    """Record the resident memory of every worker once a second."""
    while not run.is_over:
        for child in supervisor.children():
            try:
                run.resident_mib.setdefault(child.pid, []).append(child.memory_info().rss / 2**20)
            except psutil.NoSuchProcess:
                continue
        await asyncio.sleep(1)


def second_release(registry: Path) -> str:
    """Create a release in the registry whose MLP model differs from the shipped one in its version
    only."""
    shipped = next(bundle for bundle in shipped_bundles() if bundle.card.encoder == "mlp")
    folder = registry.with_name("second")
    document = {**shipped.card.document, "version": "chaos"}
    save_bundle(folder, shipped.model, document)
    load_bundle(folder)
    add = ["releases", "add", "second", str(folder), "--registry", str(registry)]
    command = [sys.executable, "-m", "gpumemnet", *add]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    shutil.rmtree(folder)
    return "second"


async def clients(
    run: Run, supervisor: psutil.Process, registry: Path, releases: list[str], kill_seconds: float
) -> None:
    """Run all clients until the time of the run is over."""
    await asyncio.gather(
        *(predict(run) for _ in range(4)),
        misbehave(run),
        observe(run),
        swap(run, registry, releases),
        kill(run, supervisor, kill_seconds),
        follow_memory(run, supervisor),
    )


def growth(run: Run) -> float:
    """Return the growth of the longest-lived worker from the middle to the last third of its life,
    without short peaks."""
    longest = max(run.resident_mib.values(), key=len)
    third = max(1, len(longest) // 3)
    return _low(longest[-third:]) / _low(longest[third : 2 * third] or longest) - 1


def _low(amounts: list[float]) -> float:
    """Return the first quartile, which excludes short peaks: a swap briefly holds two releases, a
    batch frees its memory."""
    return sorted(amounts)[len(amounts) // 4]


def start(folder: Path, registry: Path) -> tuple[psutil.Process, str]:
    """Start the service and wait until it is ready; return its process and its address."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")
    } | {
        "GPUMEMNET_WORKERS": "2",
        "GPUMEMNET_REGISTRY": str(registry),
        "GPUMEMNET_DATABASE_URL": f"sqlite:///{folder}/observations.sqlite3",
        "GPUMEMNET_API_KEYS": ",".join(
            f"{name}:{name}:{sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()
        ),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("wb") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "service", "--port", "0"], stderr=log, env=environment, cwd=ROOT
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        _, found, rest = (folder / "log").read_text().partition("listening on ")
        url = rest.split('"')[0].split()[0] if found and rest.strip() else ""
        try:
            if url and urllib.request.urlopen(f"{url}/readyz", timeout=5).status == 200:
                return process, url
        except OSError:
            pass
        time.sleep(0.05)
    process.terminate()  # which ends its workers too
    process.wait()
    raise SystemExit(f"the service did not start:\n{(folder / 'log').read_text()[-3000:]}")


def stored(folder: Path) -> set[str]:
    """Return the idempotency keys of the observations in the database."""
    with sqlite3.connect(folder / "observations.sqlite3") as database:
        return {key for (key,) in database.execute("SELECT idempotency_key FROM observations")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-every", type=float, default=10, metavar="SECONDS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        registry = folder / "registry"
        releases = ["shipped", second_release(registry)]
        supervisor, url = start(folder, registry)
        run = Run(url, random.Random(arguments.seed), time.monotonic() + arguments.seconds)
        asyncio.run(clients(run, supervisor, registry, releases, arguments.kill_every))
        supervisor.terminate()
        code = supervisor.wait(timeout=60)
        lost = run.accepted - stored(folder)
        log = (folder / "log").read_text()
    for text, is_broken in (
        (f"{len(lost)} accepted observations are not in the database", lost),
        ("the log holds a traceback", "Traceback" in log),
        (f"the service ended with {code}", code != 0),
        (
            f"{run.cut_connections} connections were cut by {run.kills} kills",
            run.cut_connections > 120 * (run.kills + 1),
        ),
        (f"memory grew by {growth(run):.1%}", arguments.seconds >= 60 and growth(run) > 0.1),
    ):
        if is_broken:
            run.broken.append(text)
    summary = {
        "seconds": arguments.seconds,
        "requests": sum(run.statuses.values()),
        "statuses": dict(sorted(run.statuses.items())),
        "observations accepted": len(run.accepted),
        "observations lost": len(lost),
        "swaps": run.swaps,
        "workers killed": run.kills,
        "connections cut": run.cut_connections,
        "memory growth": round(growth(run), 4),
        "largest worker MiB": round(max(map(max, run.resident_mib.values()))),
        "broken rules": run.broken[:20],
    }
    print(json.dumps(summary, indent=2))
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main())
