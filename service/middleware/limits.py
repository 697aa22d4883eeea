"""Limits on request bodies, before they are parsed: their size, the time to receive them, and the
work on the event loop.

The size limit is a pure ASGI middleware that counts while the body arrives, so a missing or false
Content-Length does not bypass it.  FastAPI's own limit responds in plain text, and every error of
this service is a problem document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.problems import REQUEST_TIMEOUT, Refusal

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

INLINE_BODY_BYTES: Final = 32 * 1024
"""Longer bodies are handled by :func:`run_in_turn`, so that one long batch does not delay
concurrent short requests."""

MAX_PROBABILITIES: Final = 2**18
"""Most probabilities in one response (jobs times bins): bounds the memory of a batch with narrow
bins."""

BODY_SECONDS: Final = 10.0
"""Default time to receive a body, in seconds."""

_CLOSE: Final = {"Connection": "close"}
_LIMITER: Final = RunVar[CapacityLimiter]("one thread for long bodies")


async def handle_body(handle: Callable[[bytes], Result], body: bytes) -> Result:
    """Handle a short body at once, and a long one by :func:`run_in_turn`."""
    return await run_in_turn(handle, body) if len(body) > INLINE_BODY_BYTES else handle(body)


async def run_in_turn(handle: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Handle a long body in a thread, after all long bodies before it.

    Threads share Python's lock with the event loop: each more that computes makes every other
    request wait for one more turn, and none finishes earlier.
    """
    try:
        limiter = _LIMITER.get()
    except LookupError:
        limiter = CapacityLimiter(1)
        _LIMITER.set(limiter)
    return await to_thread.run_sync(handle, *arguments, limiter=limiter)


class BodyLimit:
    """ASGI middleware that limits the size of a body and the time to receive it.

    It raises a 413 when more than ``max_body_bytes`` are announced or have arrived, and a 408 when
    the body is not complete after ``body_seconds``.  Both close the connection, and the rest of the
    body is never read.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, body_seconds: float = BODY_SECONDS
    ) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self._deadlines = _Deadlines(body_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next(
            (value for name, value in scope["headers"] if name == b"content-length"), b"0"
        )
        announced_bytes = int(announced)  # digits only: the server has checked it
        received_bytes = 0
        has_begun = is_over = False

        async def receive_limited() -> Message:
            nonlocal received_bytes, has_begun, is_over
            if announced_bytes > self.max_body_bytes:
                raise self._too_large()
            if is_over:
                return await receive()
            if not has_begun:
                has_begun = True
                self._deadlines.begin()
            try:
                message = await receive()
            except asyncio.CancelledError:
                is_over = True
                if self._deadlines.has_passed():
                    raise self._too_slow() from None
                raise
            received_bytes += len(message.get("body", b""))
            if received_bytes > self.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                is_over = True
                self._deadlines.end()
            return message

        try:
            await self.app(scope, receive_limited, send)
        finally:
            if has_begun and not is_over:
                self._deadlines.end()

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413,
            f"the body is larger than the {self.max_body_bytes} bytes that this service reads: send fewer jobs at a time",
            headers=_CLOSE,
        )

    def _too_slow(self) -> HTTPException:
        seconds = self._deadlines.seconds
        return Refusal(
            REQUEST_TIMEOUT,
            f"the body has not arrived within {seconds:g} s: send it faster, or in parts",
            _CLOSE,
        )


class _Deadlines:
    """Cancels tasks whose bodies do not arrive in time; one timer serves all, because one for each
    would dominate the cost."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._waiting: dict[asyncio.Task[Any], float] = {}
        self._passed: set[asyncio.Task[Any]] = set()
        self._is_looking = False

    def begin(self) -> None:
        """Start the deadline of the current task."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        self._waiting[task] = loop.time() + self.seconds
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(self._pause_seconds, self._look, loop)

    def end(self) -> None:
        """End the deadline: the body has arrived, or is no longer needed."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.pop(task, None)
        if self._passed:
            self._passed.discard(task)

    def has_passed(self) -> bool:
        """Whether this deadline cancelled the current task; the task then continues."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.pop(task, None)
        if task not in self._passed:
            return False
        self._passed.discard(task)
        task.uncancel()
        return True

    @property
    def _pause_seconds(self) -> float:
        return min(1.0, self.seconds / 4)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now_seconds = loop.time()
        for task, deadline_seconds in list(self._waiting.items()):
            if deadline_seconds < now_seconds:
                del self._waiting[task]
                self._passed.add(task)
                task.cancel()
        self._is_looking = bool(self._waiting)
        if self._is_looking:
            loop.call_later(self._pause_seconds, self._look, loop)
