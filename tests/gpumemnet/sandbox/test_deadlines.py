"""A deadline is for all requests for one script together."""

from __future__ import annotations

from time import sleep

import pytest

from gpumemnet.errors import ExtractError
from gpumemnet.sandbox.process import asking


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
