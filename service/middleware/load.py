"""Counts the requests in progress in this process."""

from __future__ import annotations

from typing import Final


class Load:
    """The number of requests in progress; the gate updates it, and others read it."""

    def __init__(self) -> None:
        self.in_work = 0


LOAD: Final = Load()
