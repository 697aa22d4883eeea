"""The whole loop of learning at a site, as its operator runs it: ``python
benchmarks/learning_loop.py``.

A service starts on an empty registry, so it uses the shipped release.  The script requests
predictions and reports observations over HTTP.  The first observations match the training data.
Later ones simulate a new driver with a different CUDA context. ``gpumemnet drift`` must find no
drift before this change, and drift after it.  ``gpumemnet retrain`` must promote a release, and the
running service must load it.  Predictions for new jobs, without observations, are compared before
and after.  Every step is a public command in a child process or an HTTP request.  The exit status
is 1 if a step fails.

Both drivers are simulated.  The observations are readings of the published A100 dataset.  Their own
context, of a driver that loads all kernels at once, is replaced by the one that the catalogue
expects, so the first observations are those of a site with a current driver.  The second driver
adds a constant to each (``--shift-mib``, in MiB).  The new jobs are architectures that no
retraining trains on (:mod:`models.retrain.collect`).  The shipped model was trained on them, so its
error before the retraining is too low, except for the context.

This is a benchmark, not an example, because it needs the repository's datasets and measures the
figures in ``docs/accuracy/learning-loop.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gpumemnet.client import Client
from gpumemnet.gpu import context, device_profile
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.units import MIB
from models.retrain.collect import is_held_out_key

ROOT = Path(__file__).resolve().parents[1]
DATASET = ROOT / "dataset_builder" / "datasets" / "published_mlp_a100.parquet"
GPU = "A100"
PUBLISHED_CONTEXT_BYTES = 1429 * 2**20
"""The CUDA context in the published readings."""
SOURCE = "nvidia_smi_device_1s"
"""How the published readings were taken."""
JOBS_BEFORE_CHANGE = 60
"""Number of jobs that are reported with their original readings, before the driver changes."""
RETRAINING_DUE = 10
START_SECONDS = 300.0
SWAP_SECONDS = 30.0
"""Most seconds until the service uses a new release; it checks every second and tests a release
before using it."""


class StepFailedError(Exception):
    """Raised when a step fails; the message names the step and its result."""


@dataclass(frozen=True)
class Job:
    """A job and its memory in bytes."""

    job: TrainingJob
    used_bytes: int


@dataclass(frozen=True)
class Answers:
    """Predictions of the service for the new jobs, and their actual memory.

    Attributes:
        release: the release that predicted.
        expected_mib, limit_mib, used_mib: expected, safe and actual MiB of each job; no limit if
            the service gave none.
    """

    release: str
    expected_mib: list[float]
    limit_mib: list[float | None]
    used_mib: list[float]

    @property
    def median_error_mib(self) -> float:
        """Return the median absolute error in MiB."""
        return statistics.median(
            abs(expected - used)
            for expected, used in zip(self.expected_mib, self.used_mib, strict=True)
        )


def main() -> int:
    """Run the loop and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--shift-mib",
        type=int,
        default=900,
        help="added to every reading by the other driver (%(default)s)",
    )
    parser.add_argument(
        "--jobs", type=int, default=400, help="jobs reported under the other driver (%(default)s)"
    )
    parser.add_argument("--new", type=int, default=200, help="new jobs for testing (%(default)s)")
    parser.add_argument(
        "--small",
        action="store_true",
        help="a first champion of the published MLPs, MLP-based alone: faster",
    )
    parser.add_argument(
        "--epochs", type=int, help="epochs of the training; the plan decides unless given"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the draw and of the training (%(default)s)"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is stopped too
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="learning-loop-") as folder:
            before, after = loop(arguments, Path(folder))
    except StepFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(f"\n{arguments.new} new jobs, {arguments.shift_mib:+,} MiB on every reading:\n")
    print(table(before, after))
    print(f"\n{time.monotonic() - start:.0f} s in all")
    return 0


def loop(arguments: argparse.Namespace, folder: Path) -> tuple[Answers, Answers]:
    """Run every step; return the predictions for the new jobs before and after the retraining."""
    before_change, after_change, new = draw(arguments)
    registry, database = folder / "registry", f"sqlite:///{folder / 'observations.db'}"
    training: list[object] = ["--seed", arguments.seed]
    training += ["--epochs", arguments.epochs] if arguments.epochs else []
    training += ["--encoder", "mlp", "--dataset", DATASET] if arguments.small else []
    if arguments.small:
        command(0, "-m", "gpumemnet", "train", *training, "--out", folder / "first")
        for step in (("add", "first", folder / "first" / "mlp"), ("promote", "first")):
            command(0, "-m", "gpumemnet", "releases", *step, "--registry", registry)
    with service(folder, registry, database) as url, Client(url, timeout_seconds=30) as client:
        print_step(f"the service on {url} answers from {release_of(url)}")
        report(client, before_change)
        export = exported(database, folder / "familiar.parquet")
        output = command(0, "-m", "gpumemnet", "drift", export, "--registry", registry)
        print_step(
            f"{len(before_change)} jobs reported with their original readings; drift: {output.splitlines()[-1]}"
        )

        since = datetime.now(UTC).isoformat()
        within_limit = report(client, after_change)
        print_step(
            f"{len(after_change)} jobs reported with {arguments.shift_mib:+,} MiB: {within_limit} within their limit"
        )
        export = exported(database, folder / "site.parquet", "--since", since)
        output = command(
            RETRAINING_DUE, "-m", "gpumemnet", "drift", export, "--registry", registry, "--json"
        )
        print_step(
            f"drift: {'; '.join(cause['sentence'] for cause in json.loads(output)['causes'])}"
        )

        before = ask(client, new)
        retrain_command = ["-m", "gpumemnet", "retrain", "--registry", registry]
        retrain_command += ["--work", folder / "work", *training, "--observations", export]
        retrain_command += ["--without-committed"] if arguments.small else []
        started = time.monotonic()
        output, release, seconds = retrain(retrain_command, folder, registry, url)
        print_step(f"retrained in {time.monotonic() - started:.0f} s: {output}")
        print_step(
            f"the running service answers from {release}, {seconds:.1f} s after it became champion"
        )
        after = ask(client, new)
    if after.release != release:
        raise StepFailedError(
            f"the service should answer from {release}, but answers from {after.release}"
        )
    if after.median_error_mib >= before.median_error_mib:
        raise StepFailedError(f"the new release has no smaller error:\n{table(before, after)}")
    return before, after


def draw(arguments: argparse.Namespace) -> tuple[list[Job], list[Job], list[Job]]:
    """Draw jobs with original readings, jobs with the second driver, and new jobs; all
    architectures differ."""
    rows = [row for row in read_dataset(DATASET) if row.label_bytes is not None]
    random.Random(arguments.seed).shuffle(rows)
    new = [row for row in rows if is_held_out_key(row.architecture_key)][-arguments.new :]
    keys = {row.architecture_key for row in new}
    others = [row for row in rows if row.architecture_key not in keys][
        : JOBS_BEFORE_CHANGE + arguments.jobs
    ]
    if len(new) < arguments.new or len(others) < JOBS_BEFORE_CHANGE + arguments.jobs:
        raise StepFailedError(
            f"{DATASET} holds too few jobs: {len(new)} new ones and {len(others)} others"
        )
    # drop the traced peaks, which a site rarely has: with them the formula would predict instead of
    # the model
    jobs = [
        Job(replace(row.job, traced_peak_bytes=None), row.label_bytes or 0)
        for row in (*others, *new)
    ]
    jobs = [replace(job, used_bytes=job.used_bytes + current_driver_bytes()) for job in jobs]
    changed = [replace(job, used_bytes=job.used_bytes + arguments.shift_mib * MIB) for job in jobs]
    return (
        jobs[:JOBS_BEFORE_CHANGE],
        changed[JOBS_BEFORE_CHANGE : -arguments.new],
        changed[-arguments.new :],
    )


def current_driver_bytes() -> int:
    """Return the difference between the catalogue's CUDA context of the GPU and the one in the
    published readings."""
    return context(device_profile(GPU)).expected_bytes - PUBLISHED_CONTEXT_BYTES


@contextmanager
def service(folder: Path, registry: Path, database: str) -> Iterator[str]:
    """Run the service in a child process; yield its address."""
    log = folder / "log"
    where = ["--port", "0", "--registry", str(registry), "--database-url", database]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "service", *where], stderr=stream, env=environment(), cwd=ROOT
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"listening on (http://[0-9.:]+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise StepFailedError(f"the service did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(timeout=60)


def environment() -> dict[str, str]:
    """Return the environment of this process without settings of the service."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")}


def command(code: int, *arguments: object) -> str:
    """Run a command of the project, which must exit with ``code``; return its standard output."""
    command_line = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command_line, capture_output=True, text=True, check=False, env=environment(), cwd=ROOT
    )
    if done.returncode != code:
        shown = " ".join(map(str, arguments))
        raise StepFailedError(
            f"'{shown}' ended with {done.returncode} instead of {code}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def retrain(
    arguments: Sequence[object], folder: Path, registry: Path, url: str
) -> tuple[str, str, float]:
    """Retrain, and meanwhile query which release the service uses.

    Returns:
        The output of the command, the release that the service loaded, and the seconds from
        promotion to that moment.
    """
    old, log = release_of(url), folder / "retrain.log"
    ended_at: float | None = None
    with log.open("wb") as stream:
        command_line = [sys.executable, *map(str, arguments)]
        process = subprocess.Popen(
            command_line, stdout=stream, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT
        )
    try:
        while (release := release_of(url)) == old:
            if ended_at is None and process.poll() is not None:
                ended_at = time.monotonic()
            if ended_at is not None and (
                process.returncode or time.monotonic() - ended_at > SWAP_SECONDS
            ):
                break
            time.sleep(0.05)
        seen = time.time()
        process.wait()
    finally:
        process.kill()
    if process.returncode:
        reports = folder.glob("work/runs/*/report.json")
        reasons = [json.loads(path.read_text("utf-8"))["reasons"] for path in reports]
        raise StepFailedError(
            f"the retraining ended with {process.returncode} instead of 0:\n{log.read_text()}{reasons}"
        )
    if release == old:
        raise StepFailedError(
            f"the service still answers from {old} {SWAP_SECONDS:.0f} s after the retraining"
        )
    output = next((line for line in log.read_text().splitlines() if release in line), "")
    return output, release, seen - (registry / "aliases.json").stat().st_mtime


def exported(database: str, out: Path, *more: str) -> Path:
    """Export the observations so far as a dataset; return its path."""
    command(
        0,
        "-m",
        "gpumemnet",
        "observations",
        "export",
        "--database-url",
        database,
        "--out",
        out,
        *more,
    )
    return out


def report(client: Client, jobs: Sequence[Job]) -> int:
    """Request a prediction for every job and report its memory; return how many stayed within their
    limit."""
    within_limit = 0
    for job in jobs:
        predicted = client.predict(job.job, gpu=GPU)
        client.observe(
            prediction_id=predicted.prediction_id,
            peak_bytes=job.used_bytes,
            source=SOURCE,
            idempotency_key=predicted.prediction_id,
        )
        within_limit += predicted.safe_bytes is not None and job.used_bytes <= predicted.safe_bytes
    return within_limit


def ask(client: Client, jobs: Sequence[Job]) -> Answers:
    """Return the service's predictions for the new jobs."""
    predicted = [client.predict(one.job, gpu=GPU) for one in jobs]
    releases = {one.release for one in predicted}
    if len(releases) > 1:
        raise StepFailedError(f"several releases answered: {', '.join(sorted(releases))}")
    return Answers(
        release=releases.pop(),
        expected_mib=[one.expected_bytes / MIB for one in predicted],
        limit_mib=[one.safe_bytes and one.safe_bytes / MIB for one in predicted],
        used_mib=[one.used_bytes / MIB for one in jobs],
    )


def release_of(url: str) -> str:
    """Return the release that the service uses."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["release"])


def table(before: Answers, after: Answers) -> str:
    """Return a Markdown table of both results."""
    lines = ["| | before | after |", "|---|---:|---:|"]
    cells = {one.release: figures(one) for one in (before, after)}
    for name, first in cells[before.release].items():
        lines.append(f"| {name} | {first} | {cells[after.release][name]} |")
    return "\n".join(lines)


def figures(answers: Answers) -> dict[str, str]:
    """Return the rows of the table: name → figure."""
    rows = list(zip(answers.expected_mib, answers.limit_mib, answers.used_mib, strict=True))
    percent = statistics.median(abs(expected - used) / used for expected, _, used in rows)
    limited = [(limit, used) for _, limit, used in rows if limit is not None]
    above = sum(used > limit for limit, used in limited)
    return {
        "release": answers.release,
        "median error": f"{answers.median_error_mib:,.1f} MiB, {percent:.2%}",
        "took more than expected": f"{sum(used > expected for expected, _, used in rows) / len(rows):.0%}",
        "took more than the limit (1% promised)": f"{above} of {len(limited)}",
        "limits above what the jobs take, in sum": f"{sum(limit for limit, _ in limited) / sum(t for _, t in limited) - 1:.1%}",
        "jobs without a limit": f"{len(rows) - len(limited)}",
    }


def print_step(sentence: str) -> None:
    """Print the result of a step without buffering."""
    print(f"* {sentence}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
