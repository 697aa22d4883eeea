"""What all tests share: their settings, and a real service in a child process for every test that
asks one."""

import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import skips, watchdog
from tests.environments import environment_without_settings

START_SECONDS = 300
"""Long enough for a machine that is busy with other work: a service usually starts in two
seconds."""

# A busy machine is no reason to fail, so examples have no deadline and may be slow to make.
settings.register_profile(
    "tests", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# Every httpx.get reads all certificates of the system anew, which takes longer than an answer.
ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell: children would ignore Ctrl-C too, and some tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class RunningService:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


def pytest_configure() -> None:
    watchdog.start()


def pytest_addoption(parser: pytest.Parser) -> None:
    skips.add_option(parser)
    parser.addoption(
        "--examples",
        type=int,
        default=1,
        metavar="FACTOR",
        help="so many times the examples of each property test",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    skips.check(session)


LONGEST_FIRST = (
    *("tracing/test_whole_run", "retrain/test_retrain", "named/test_exact"),
    *("measure/test_campaign", "tracing/test_idioms"),
    *("api/test_schemathesis", "training/test_training", "service/test_process"),
    *("tracing/test_script", "real_scripts/test_real_scripts", "traces/test_true_values"),
    *("launchers/test_deepspeed_engine", "batch/test_batch_runs", "golden/test_golden_traces"),
    *("page/test_page_browser", "observations/test_observations", "packaging/test_wheel"),
    *("tracing/test_compiled", "tracing/test_batch_setting"),
    *("launchers/test_fully_sharded", "gpumemnet/test_trainer_callbacks", "docs/test_docs"),
    *("extract/test_extract_file", "tracing/test_child_programs", "tests/test_size"),
)
"""Files of tests that begin first, so that two workers end together; ``make test`` keeps the
order.  pytest-xdist would end with the files of one long test."""


def _place(item: pytest.Item) -> int:
    name = "/".join(item.path.with_suffix("").parts[-2:])
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    factor = config.getoption("examples")
    for item in items if factor != 1 else ():
        test = getattr(item, "obj", None)
        # Hypothesis has no public way to change them later
        chosen = getattr(test, "_hypothesis_internal_use_settings", None)
        if test is not None and chosen is not None:
            more = settings(chosen, max_examples=factor * chosen.max_examples)
            test._hypothesis_internal_use_settings = more


StartService = Callable[..., AbstractContextManager[RunningService]]


@contextmanager
def running_service(log: Path, *arguments: str, **environment: str) -> Iterator[RunningService]:
    variables = {
        "GPUMEMNET_DATABASE_URL": f"sqlite:///{log.parent / 'observations.sqlite3'}",
        **environment,
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "service", "--port", "0", *arguments],
            stderr=stream,
            env=environment_without_settings(**variables),
        )
    try:
        yield RunningService(_address(process, log), process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=300)
        finally:
            process.kill()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = re.search(r"listening on (http://\S+)", log.read_text())
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"the service did not start:\n{log.read_text()}")


@pytest.fixture(scope="session")
def start_service(tmp_path_factory: pytest.TempPathFactory) -> StartService:
    """Starts a service on a free port, with the arguments and the environment given, for a ``with``
    statement.

    Each has a database of its own unless the environment names one.
    """

    def start(*arguments: str, **environment: str) -> AbstractContextManager[RunningService]:
        return running_service(
            tmp_path_factory.mktemp("service") / "log", *arguments, **environment
        )

    return start


@pytest.fixture(scope="session")
def service(start_service: StartService) -> Iterator[RunningService]:
    """One service with the shipped bundles, shared by all tests."""
    with start_service() as running:
        yield running
