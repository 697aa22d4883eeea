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
    began = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < deadline, what()
        time.sleep(max(0.02, 3 * (now - began)))  # looking takes time of what is waited for
        began = time.monotonic()
