"""Runs one worker: the application on one event loop in this process, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from types import FrameType
from typing import Final, NoReturn

from .heap import GROWTH_BYTES, give_memory_back, use_one_heap
from .listening import BACKLOG
from .settings import Settings

VITALS_SECONDS: Final = 1.0
"""Greatest age of a worker's figures in ``/metrics``."""


def serve(
    settings: Settings, listener: socket.socket, on_ready: Callable[[], None], lifeline: socket.socket | None = None
) -> int:
    """Serve requests at ``listener`` until SIGTERM or SIGINT; returns the exit code.

    Args:
        settings: of the service.
        listener: the socket.
        on_ready: called once, when the service is ready.
        lifeline: the service also ends when its other end is closed, that is, when the supervisor has died.

    Raises:
        GpumemnetError: when the service cannot start.
    """
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # before numpy is loaded: more threads slow down such small matrix products
    use_one_heap()
    signal.signal(signal.SIGTERM, _leave)
    import uvicorn

    from .app import create_app
    from .connections import ConnectionLimits, connection_type
    from .middleware.load import LOAD
    from .middleware.logs import current_log
    from .middleware.metrics import Vitals, resident_memory_bytes

    class Server(uvicorn.Server):
        """A uvicorn server that does not raise the signal again after a clean shutdown, which is no failure."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number in before:
                    signal.signal(number, signal.SIG_IGN)  # already shutting down

    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_type(
            ConnectionLimits(
                head_bytes=settings.max_head_bytes,
                head_fields=settings.max_head_fields,
                head_seconds=settings.head_seconds,
                body_seconds=settings.body_seconds,
                idle_seconds=settings.idle_seconds,
                connections=settings.max_connections,
                connections_per_address=settings.max_connections_per_address,
            )
        ),
        ws="none",
        lifespan="off",  # started here, so that its errors become one clear message
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the rate limit must not trust an address from the client
        backlog=BACKLOG,
        timeout_keep_alive=ceil(settings.idle_seconds),
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    server = Server(config)

    def end(lifeline: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        server.should_exit = True

    async def follow() -> None:
        vitals, log = Vitals(), current_log()
        kept_bytes: int | None = None
        while True:
            resident_bytes = vitals.update(LOAD.in_work, 0 if log is None else log.sink.dropped)
            if resident_bytes is not None and (kept_bytes is None or resident_bytes > kept_bytes + GROWTH_BYTES):
                await asyncio.to_thread(give_memory_back)
                kept_bytes = min(resident_bytes, resident_memory_bytes() or resident_bytes)
            await asyncio.sleep(VITALS_SECONDS)

    async def run() -> None:
        if lifeline is not None:
            asyncio.get_running_loop().add_reader(lifeline, end, lifeline)
        if (log := current_log()) is not None:
            log.sink.start()
        following = asyncio.create_task(follow())
        async with app.router.lifespan_context(app):
            gc.collect()
            gc.freeze()  # permanent objects: a full collection over them would pause all responses for some 10 ms
            await server.serve(sockets=[listener])
        following.cancel()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End on a SIGTERM before the first request: nothing was accepted, and a running migration ends with its parent process.

    An exception would be lost, and the signal with it, when the signal arrives while Python frees an object.
    """
    os._exit(0)
