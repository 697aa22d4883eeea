"""How many requests are in work in this process."""

from __future__ import annotations

from typing import Final


class Load:
    """A count that the gate keeps, and others look at."""

    def __init__(self) -> None:
        self.in_work = 0


LOAD: Final = Load()
