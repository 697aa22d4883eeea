"""A skip fails the session unless its reason is on the list, and nothing outlives a session."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.skips import LIST, allowed_patterns, refused

ROOT = Path(__file__).parents[1]
CONFTEST = "from tests.skips import add_option as pytest_addoption, check as pytest_sessionfinish\n"
SKIPPING = "import pytest\ndef test_it(): pytest.skip({!r})\n"


def test_a_reason_is_accepted_by_its_pattern_alone() -> None:
    patterns = allowed_patterns("# GPUs\nno GPU: *\n\nneeds gpumemnet[ray]\n")
    assert patterns == ["no GPU: *", "needs gpumemnet[ray]"]
    assert refused(["no GPU: none", "needs gpumemnet[ray]"], patterns) == {}
    assert refused(["no GPU", "needs gpumemnetr", "no GPU"], patterns) == {
        "no GPU": 2,
        "needs gpumemnetr": 1,
    }
    assert refused(["anything"], []) == {"anything": 1}


@pytest.mark.parametrize(
    ("reason", "strict", "processes", "status"),
    [("new", True, 2, 1), ("new", False, 0, 0), ("listed", True, 0, 0)],
)
def test_a_session_fails_on_a_reason_that_is_not_listed(
    tmp_path: Path, reason: str, strict: bool, processes: int, status: int
) -> None:
    said = (
        reason
        if reason == "new"
        else allowed_patterns(LIST.read_text("utf-8"))[0].replace("*", "something")
    )
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_skipping.py").write_text(SKIPPING.format(said))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-n",
        str(processes),
        *["--strict-skips"] * strict,
        str(tmp_path),
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("1 x new" in done.stdout) == (status == 1)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, which only Linux has"
)
def test_a_session_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    script = tmp_path / "session.py"
    script.write_text(
        "import subprocess, sys, time\nfrom tests import watchdog\nwatchdog.start()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as session:
        assert session.stdout is not None
        child = int(session.stdout.readline())
        assert psutil.pid_exists(child)
        session.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)
