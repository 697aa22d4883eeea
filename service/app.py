"""Makes the ASGI application from the settings, and starts and stops everything that lives as long
as the service."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route
from uvicorn.config import STARTUP_FAILURE

from gpumemnet.errors import GpumemnetError
from gpumemnet.sandbox import end_with_parent
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB

from .api.access import ApiKey
from .api.admission import AccessControl
from .api.handlers import JsonHandler
from .api.openapi import openapi_document
from .api.operations import other_operations, prediction_operations
from .observations.database import DatabaseAwayError
from .observations.routes import observation_operations
from .observations.store import ObservationStore
from .page import docs_routes, page_routes
from .served_release import FOLLOW_SECONDS, ServedRelease
from .settings import Settings, SettingsError, read_settings

KEYS_SECONDS: Final = 1.0
"""Time between two looks at the file of keys."""
STOP_SECONDS: Final = 1.0
"""How long the service waits for a thread when it ends: a folder in the network may hang."""
SWITCH_SECONDS: Final = 0.0001
"""How long a prediction waits for Python's lock while a thread computes; Python's own 5 ms add up
over each of its steps."""

_INFO: Final = {
    "title": "gpumemnet",
    "version": version("gpumemnet"),
    "summary": "How much GPU memory a training job will take, before it starts.",
    "description": "Memory is that of the process as nvidia-smi shows it, CUDA context included. "
    "Names end in their unit: `_bytes`, or `_mib` for 2**20 bytes, rounded up. Every error is a "
    "problem document (RFC 9457).",
    "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
}

logger = logging.getLogger("gpumemnet.service")


def worker_app() -> FastAPI:
    """The application of one of several workers; a mistake in the settings ends all of them."""
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        return create_app(read_settings())
    except GpumemnetError as error:
        sys.stderr.write(f"gpumemnet service: {error}\n")
        sys.exit(STARTUP_FAILURE)


def create_app(settings: Settings) -> FastAPI:
    """The service, with its models loaded and tested.

    Raises:
        BundleError: when a bundle cannot be loaded or fails its test.
        SettingsError: when keys cannot be read.
        DatabaseError: when the database cannot be used, now or later.
    """
    keys, store = settings.keys(), None
    if (database := settings.observations()) is not None:
        store = ObservationStore(database)
        try:
            store.prepare()
        except DatabaseAwayError as error:
            logger.warning("observations are refused until the database can be reached: %s", error)
    registry = None if settings.registry is None else Registry(settings.registry)
    serving = ServedRelease(
        recorder=store,
        registry=registry,
        bundles=settings.bundles,
        predictor_settings={
            "gpu": settings.gpu,
            "context_bytes": None if settings.context_mib is None else settings.context_mib * MIB,
        },
    )
    operations = [
        *prediction_operations(serving),
        *other_operations(serving),
        *observation_operations(store),
    ]
    document = openapi_document(_INFO, operations, has_keys=keys is not None)
    threads: list[Repeated] = []
    if registry is not None:
        threads.append(Repeated("gpumemnet-registry", FOLLOW_SECONDS, serving.follow))
    if keys is not None and settings.api_keys_file is not None:
        threads.append(Repeated("gpumemnet-keys", KEYS_SECONDS, KeyFile(settings, keys).follow))
    routes = [
        *(Route(one.path, one.handler, methods=[one.method]) for one in operations),
        Route("/openapi.json", JsonHandler(lambda body: document), methods=["GET"]),
        *page_routes(),
        *docs_routes(),
    ]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sys.setswitchinterval(SWITCH_SECONDS)
        logging.captureWarnings(True)
        if store is not None:
            store.start()
        for thread in threads:
            thread.start()
        gc.collect()
        gc.freeze()  # a full collection over permanent objects would pause all responses for some 10 ms
        gpu = serving.api.predictor.prediction_gpu(None)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        logger.info(
            "listening on http://%s:%d (a page to try it in a browser; its API at /docs)%s",
            host,
            settings.port,
            f"; an answer for {gpu.gpu} {gpu.context.advice}" if gpu.context.advice else "",
        )
        yield
        for thread in threads:
            await run_in_threadpool(thread.stop)
        if store is not None:
            await run_in_threadpool(store.drain)

    app = FastAPI(
        routes=routes,
        openapi_url=None,  # FastAPI's own route would write the document anew for every request
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
        },  # checked in every request
        lifespan=lifespan,
    )
    app.openapi = lambda: document  # type: ignore[method-assign]  # FastAPI's documented way
    app.state.settings = settings
    # The default layers of Starlette and FastAPI (errors, exit stacks of dependencies) cost 30 µs a
    # request, a tenth of a response.  The access control handles the errors instead.
    app.build_middleware_stack = lambda: AccessControl(  # type: ignore[method-assign]
        app=app.router,
        keys=keys,
        hosts=settings.hosts(),
        max_concurrency=settings.max_concurrency,
    )
    return app


class Repeated(threading.Thread):
    """A thread that calls a function until it is stopped, and survives its errors; start it in the
    process that serves.

    Args:
        name: name of the thread.
        seconds: pause before each call.
        action: the function.
    """

    def __init__(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._seconds, self._action = seconds, action
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop the thread, and wait a moment until it has ended."""
        self._stopping.set()
        self.join(STOP_SECONDS)

    def run(self) -> None:
        """Call the function again and again."""
        while not self._stopping.wait(self._seconds):
            try:
                self._action()
            except Exception:
                logger.exception("%s failed", self.name)


@dataclass(eq=False)
class KeyFile:
    """Follows the file of keys: a removed key stops working without a signal, as where a Secret is
    mounted.

    Attributes:
        settings: of the service.
        keys: the keys in use.
    """

    settings: Settings
    keys: dict[bytes, ApiKey]
    _failure: str = ""

    def follow(self) -> None:
        """Read the keys again; a file that cannot be used changes nothing."""
        try:
            keys = self.settings.keys()
        except SettingsError as error:
            if str(error) != self._failure:
                logger.error("the keys stay as they were: %s", error)
            self._failure = str(error)
            return
        self._failure = ""
        if keys is not None and keys != self.keys:
            self.keys.update(keys)  # first: each request finds a key that stays
            for gone in self.keys.keys() - keys.keys():
                del self.keys[gone]
            logger.info("the keys have changed: %d", len(self.keys))
