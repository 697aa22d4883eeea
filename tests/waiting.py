"""Waiting for what another thread or process does; patient, because a busy machine is no reason to
fail."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], bool], what: Callable[[], str] = lambda: "it did not happen"
) -> None:
    """Returns when ``condition`` holds, which is looked at often; after 300 seconds the test fails
    and says ``what``."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)
