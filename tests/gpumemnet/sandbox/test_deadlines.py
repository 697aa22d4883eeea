"""A deadline is for all requests for one script together."""

from __future__ import annotations

from time import process_time, sleep

import pytest

from gpumemnet.errors import ExtractError
from gpumemnet.sandbox.process import asking, shorten_alarm, stop_alarm


def wait(request: dict[str, float]) -> float:
    """Take as many seconds as ``request`` says."""
    sleep(request["seconds"])
    return request["seconds"]


def test_a_later_request_has_what_earlier_ones_left() -> None:
    with asking(wait, "train.py", purpose="", deadline_seconds=6) as asked:
        assert asked({"seconds": 1}) == 1
        with pytest.raises(ExtractError, match=r"train.py: was not done after [0-4][.\d]* seconds"):
            asked({"seconds": 60})
        with pytest.raises(ExtractError, match=r"train.py: was not done after 6 seconds"):
            asked({"seconds": 0})


def stop_and_go_on(request: dict[str, float]) -> str:
    """Compute on once the alarm was stopped, and something would have shortened it."""
    stop_alarm()
    shorten_alarm(0.1, bool)
    end = process_time() + request["seconds"]
    while process_time() < end:
        pass
    return "done"


def test_an_alarm_that_was_stopped_does_not_come_back() -> None:
    with asking(stop_and_go_on, "train.py", purpose="", deadline_seconds=30) as asked:
        assert asked({"seconds": 1.0}) == "done"
