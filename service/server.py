"""Runs one worker: the application on one event loop in this process, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from time import monotonic
from types import FrameType
from typing import Final, NoReturn, cast

from .heap import GROWTH_BYTES, give_memory_back, use_one_heap
from .listening import BACKLOG
from .settings import Settings, SettingsError

DRAIN_SECONDS: Final = 0.5
"""How long a connection without a request stays open when the service ends, so that a request on
its way is still answered."""
FIRST_REQUEST_SECONDS: Final = 3.0
"""The same for a connection on which no byte has arrived: its client has just connected, and is
busy if its request is late."""

VITALS_SECONDS: Final = 1.0
"""Greatest age of a worker's figures in ``/metrics``."""
SWITCH_SECONDS: Final = 0.001
"""How long a prediction waits for Python's lock while a search computes; Python's own 5 ms add up
over each of its steps."""


logger = logging.getLogger("gpumemnet.service")


def serve(
    settings: Settings,
    listener: socket.socket,
    on_ready: Callable[[], None],
    lifeline: socket.socket | None = None,
) -> int:
    """Serve requests at ``listener`` until SIGTERM or SIGINT; returns the exit code.

    SIGHUP reads the file of keys again.  Without one it ends the service as SIGTERM does, unless a
    supervisor decides that.

    Args:
        settings: of the service.
        listener: the socket.
        on_ready: called once, when the service is ready.
        lifeline: the service also ends when its other end is closed, that is, when the supervisor
            has died.

    Raises:
        GpumemnetError: when the service cannot start.
    """
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(
            variable, "1"
        )  # before numpy is loaded: more threads slow down such small matrix products
    use_one_heap()
    sys.setswitchinterval(SWITCH_SECONDS)
    signal.signal(signal.SIGTERM, _leave)
    reloads_keys = settings.api_keys_file is not None
    hangups: list[int] = []
    if reloads_keys:
        signal.signal(signal.SIGHUP, lambda number, frame: hangups.append(number))
    elif lifeline is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _leave)
    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is _leave:
        ending.append(signal.SIGHUP)
    import uvicorn

    from .app import create_app, read_keys
    from .connections import Connection, ConnectionLimits, Waiting, connection_type
    from .middleware.load import LOAD
    from .middleware.logs import current_log
    from .middleware.metrics import Vitals, resident_memory_bytes

    class Server(uvicorn.Server):
        """A uvicorn server that does not raise the signal again after a clean shutdown, which is no
        failure."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self.handle_exit) for number in ending}
            try:
                yield
            finally:
                for number in before:
                    signal.signal(number, signal.SIG_IGN)  # already shutting down

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            LOAD.is_ending = True
            await self._accept_waiting()
            begun_seconds = monotonic()
            while self._waits_for_requests(monotonic() - begun_seconds) and not self.force_exit:
                await asyncio.sleep(0.02)
            await super().shutdown(sockets)

        def _waits_for_requests(self, passed_seconds: float) -> bool:
            """Whether a request may still be on its way, this long after the service began to
            end."""
            connections = cast("set[Connection]", self.server_state.connections)
            if passed_seconds < DRAIN_SECONDS:
                return bool(connections)
            is_new = any(each.waits_for is Waiting.FIRST_BYTE for each in connections)
            return is_new and passed_seconds < min(FIRST_REQUEST_SECONDS, settings.shutdown_seconds)

        async def _accept_waiting(self) -> None:
            """Stop listening, but accept the connections that the system has: closing the socket
            would reset them."""
            waiting: list[socket.socket] = []
            with listener.dup() as queue, suppress(OSError):  # none waits any more
                queue.setblocking(False)
                for each in self.servers:
                    each.close()
                while True:  # without a pause, in which clients that are answered could connect again and again
                    waiting.append(queue.accept()[0])
            for connection in waiting:
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)

        def _protocol(self) -> asyncio.Protocol:
            protocol: type = config.http_protocol_class
            made: asyncio.Protocol = protocol(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

    app = create_app(settings)
    gc.collect()
    gc.freeze()  # permanent objects: a full collection over them would pause all responses for some 10 ms
    app.state.searches.start()
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
    code = 0

    def end(lifeline: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        server.should_exit = True

    def reload_keys() -> None:
        try:
            keys = read_keys(settings)
        except SettingsError as error:
            logger.error("the keys stay as they were: %s", error)
            return
        app.state.keys.replace(keys)
        logger.info("the keys were read again: %d", len(app.state.keys))

    async def follow() -> None:
        vitals, log = Vitals(), current_log()
        kept_bytes: int | None = None
        while True:
            resident_bytes = vitals.update(LOAD.in_work, 0 if log is None else log.sink.dropped)
            if resident_bytes is not None and (
                kept_bytes is None or resident_bytes > kept_bytes + GROWTH_BYTES
            ):
                await asyncio.to_thread(give_memory_back)
                kept_bytes = min(resident_bytes, resident_memory_bytes() or resident_bytes)
            await asyncio.sleep(VITALS_SECONDS)

    async def search() -> None:
        nonlocal code
        await app.state.searches.run()
        logger.error(
            "the process for searches has died, and this one ends after the requests in progress"
        )
        code = 1
        server.should_exit = True

    async def run() -> None:
        if lifeline is not None:
            asyncio.get_running_loop().add_reader(lifeline, end, lifeline)
        if (log := current_log()) is not None:
            log.sink.start()
        if reloads_keys:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_keys)
            if hangups:
                reload_keys()
        following = asyncio.create_task(follow())
        searching = asyncio.create_task(search())
        async with app.router.lifespan_context(app):
            gc.collect()
            gc.freeze()
            await server.serve(sockets=[listener])
        following.cancel()
        searching.cancel()
        app.state.searches.stop()

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())
    return code


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End on a SIGTERM before the first request: nothing was accepted, and a running migration ends
    with its parent process.

    An exception would be lost, and the signal with it, when the signal arrives while Python frees
    an object.
    """
    os._exit(0)
