"""Simulated CUDA streams, which only tell the recorder on which stream memory is allocated.

The caching allocator keeps a pool for each stream.  Memory that ``fully_shard`` or a script's
prefetching allocates on another stream is not reused by the rest of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Final

import torch


class Event:
    """An event that has happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Happen at once."""

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True

    def elapsed_time(self, end: object) -> float:
        """No time passes."""
        return 0.0


class NumberedStream:
    """A stream; 0 is the default one.

    Args:
        number: of the stream.
        streams: set to this stream while it is entered.
    """

    priority = 0
    device = torch.device("cuda", 0)

    def __init__(self, number: int, streams: Streams) -> None:
        self.number: Final = number
        self._streams = streams
        self._before: list[NumberedStream] = []

    @property
    def cuda_stream(self) -> int:
        """A number in place of the driver's handle."""
        return self.number

    stream_id = cuda_stream

    def __enter__(self) -> NumberedStream:
        self._before.append(self._streams.current_stream())
        self._streams.set_stream(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.set_stream(self._before.pop())

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether the stream is idle: always."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured: never."""
        return False


class Streams:
    """The stream functions of a device's module, such as ``torch.cuda``.

    Args:
        chosen: called with the number of the stream on which memory is allocated from now on.
    """

    Event = Event

    def __init__(self, chosen: Callable[[int], None]) -> None:
        self._chosen = chosen
        self._default = self._current = NumberedStream(0, self)
        streams, numbers = self, count(1)

        class Stream(NumberedStream):
            """A new stream."""

            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(next(numbers), streams)

        self.Stream = Stream

    def current_stream(self, device: object = None) -> NumberedStream:
        """Return the current stream."""
        return self._current

    def default_stream(self, device: object = None) -> NumberedStream:
        """Return the default stream."""
        return self._default

    def stream(self, stream: NumberedStream | None) -> NumberedStream:
        """Return a context in which memory is allocated on ``stream``."""
        return stream or self._current

    def set_stream(self, stream: NumberedStream) -> None:
        """Allocate on ``stream`` from here on."""
        self._current = stream
        self._chosen(stream.number)
