"""CUDA streams that do nothing but tell the recorder on which of them memory is asked for.

The caching allocator keeps a pool for each stream: what ``fully_shard``, or a script's own prefetching, allocates on a stream of
its own is not shared with the rest of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

_NUMBERS: Final = count(1)


class Event:
    """An event that has happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Happens at once."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: object) -> float:
        """No time passes."""
        return 0.0


class NumberedStream:
    """A stream; 0 is the default one."""

    def __init__(self, number: int) -> None:
        self.number: Final = number

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Nothing is left to do."""
        return True

    def is_capturing(self) -> bool:
        """No graph is recorded."""
        return False


class Streams:
    """What PyTorch's code and a script ask of a device's module, such as ``torch.cuda``, about streams.

    Args:
        chosen: told the number of the stream on which memory is asked for from now on.
    """

    Event = Event

    def __init__(self, chosen: Callable[[int], None]) -> None:
        self._chosen = chosen
        self._default = self._current = NumberedStream(0)

    def Stream(self, *args: object, **kwargs: object) -> NumberedStream:
        """A new stream."""
        return NumberedStream(next(_NUMBERS))

    def current_stream(self, device: object = None) -> NumberedStream:
        """The stream that is chosen."""
        return self._current

    def default_stream(self, device: object = None) -> NumberedStream:
        """The stream that is chosen at first."""
        return self._default

    @contextmanager
    def stream(self, stream: NumberedStream | None) -> Iterator[None]:
        """Context in which memory is asked for on ``stream``."""
        before = self._current
        self._choose(stream or before)
        try:
            yield
        finally:
            self._choose(before)

    def current_device(self) -> int:
        """The only one."""
        return 0

    def is_available(self) -> bool:
        """Yes."""
        return True

    def _choose(self, stream: NumberedStream) -> None:
        self._current = stream
        self._chosen(stream.number)
