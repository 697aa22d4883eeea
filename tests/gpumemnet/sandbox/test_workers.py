import subprocess
import sys
import time
from pathlib import Path

import psutil

PARENT = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from gpumemnet.sandbox import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=end_with_parent)
    pids = {one.result() for one in [pool.submit(os.getpid) for _ in range(2)]}
    [pool.submit(time.sleep, 600) for _ in range(2)]
    print(*sorted(pids | set(pool._processes)), flush=True)
    time.sleep(600)
"""


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    deadline = time.monotonic() + 300
    while any(map(_lives, workers)):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)
