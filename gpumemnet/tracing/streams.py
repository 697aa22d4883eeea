"""CUDA streams that do nothing but tell the recorder on which of them memory is asked for.

The caching allocator keeps a pool for each stream: what ``fully_shard``, or a script's own prefetching, allocates on a stream of
its own is not shared with the rest of the step.
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
    """A stream; 0 is the default one.

    Args:
        number: of the stream.
        streams: told when it is chosen for a while.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._streams.set_stream(self._before.pop())

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
        self._default = self._current = NumberedStream(0, self)
        streams, numbers = self, count(1)

        class Stream(NumberedStream):
            """A new stream."""

            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(next(numbers), streams)

        self.Stream = Stream

    def current_stream(self, device: object = None) -> NumberedStream:
        """The stream that is chosen."""
        return self._current

    def default_stream(self, device: object = None) -> NumberedStream:
        """The stream that is chosen at first."""
        return self._default

    def stream(self, stream: NumberedStream | None) -> NumberedStream:
        """Context in which memory is asked for on ``stream``."""
        return stream or self._current

    def set_stream(self, stream: NumberedStream) -> None:
        """From here on memory is asked for on ``stream``."""
        self._current = stream
        self._chosen(stream.number)
