"""Counts the requests in progress in this process, and says whether it is ending."""

from __future__ import annotations

from typing import Final


class Load:
    """What the gate and the server tell each other.

    Attributes:
        in_work: the number of requests in progress; the gate updates it, and others read it.
        is_ending: whether the process ends: responses then close their connection.
    """

    def __init__(self) -> None:
        self.in_work = 0
        self.is_ending = False


LOAD: Final = Load()
