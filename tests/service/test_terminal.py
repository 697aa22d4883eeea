"""What a person sees who starts the service in a terminal."""

import os
import pty
import subprocess
import sys
import time


def test_a_person_is_greeted_and_ends_it_with_ctrl_c() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gpumemnet", "serve", "--port", "0", "--database-url", "off"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")
    }
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
        env=environment,
    ) as process:
        os.close(theirs)
        try:
            said = b""
            while said.count(b"\n") < 2:
                said += os.read(ours, 4096)
            first, second = said.decode().splitlines()
            assert first.startswith("gpumemnet answers at http://127.0.0.1:")
            assert second == "Press Ctrl-C to stop."
            os.write(ours, b"\x03")
            assert process.wait(timeout=300) == 0
            time.sleep(0.1)
            assert b"Traceback" not in os.read(ours, 4096)
        finally:
            process.kill()
            os.close(ours)


def _take_terminal() -> None:
    """Ctrl-C is sent to the processes that this terminal controls."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
