"""Makes the ASGI application from the settings, and starts and stops everything that lives as long
as the service."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB

from .admin.routes import admin_operations
from .api.endpoint import DescriptionEndpoint
from .api.operations import openapi_document, routes
from .api.predictions import PredictionApi
from .api.problems import ProblemDocuments
from .api.routes import other_operations, prediction_operations
from .middleware.gate import Gate
from .middleware.keys import KeyRing, parse_keys
from .middleware.limits import BodyLimit
from .middleware.metrics import CountingRecorder, metrics_routes
from .observations.database import DatabaseAwayError
from .observations.routes import observation_operations
from .observations.store import ObservationStore
from .page.routes import docs_routes, page_routes
from .searches import SearchProcess
from .serving.served_release import ServedRelease
from .serving.shadow import Shadow
from .serving.watch import Watcher
from .settings import OFF, PREFIX, Settings, SettingsError

DATABASE_FILE: Final = "observations.sqlite3"

logger = logging.getLogger("gpumemnet.service")


def create_app(settings: Settings) -> FastAPI:
    """The service, with its models loaded and tested.

    Raises:
        BundleError: when a bundle cannot be loaded or fails its test.
        SettingsError: when keys cannot be read, or the default folder of observations cannot be
            created.
        DatabaseError: when the database cannot be used, now or later.
    """
    store = _store(settings)
    shadow = Shadow(store, settings.shadow_share)
    recorder = CountingRecorder(shadow)

    def build(predictor: Predictor, release: str) -> PredictionApi:
        return PredictionApi(predictor, settings.max_jobs, recorder, release, settings.max_layers)

    registry = None if settings.registry is None else Registry(settings.registry)
    predictor_settings = {
        "gpu": settings.gpu,
        "context_bytes": None if settings.context_mib is None else settings.context_mib * MIB,
    }
    serving = ServedRelease(
        build,
        registry=registry,
        bundles=settings.bundles,
        shadow=shadow,
        predictor_settings=predictor_settings,
        is_champion_required=settings.require_champion,
    )
    searches = SearchProcess(serving)
    operations = [
        *prediction_operations(serving, searches),
        *other_operations(serving),
        *observation_operations(store),
        *admin_operations(serving),
    ]
    app = FastAPI(
        routes=[
            *routes(operations),
            *metrics_routes(),
            *page_routes(),
            *docs_routes(),
            Route(
                "/openapi.json",
                DescriptionEndpoint(lambda: app.openapi()),
                methods=["GET"],
                name="openapi",
            ),
        ],
        title="gpumemnet",
        version=version("gpumemnet"),
        summary="How much GPU memory a training job will take, before it starts.",
        description=(
            "Memory is that of the process as nvidia-smi shows it, CUDA context included. Names end in their unit: `_bytes`, "
            "or `_mib` for 2**20 bytes, rounded up. Every error is a problem document (RFC 9457)."
        ),
        openapi_url=None,  # FastAPI's own route would write the document anew for every request
        docs_url=None,
        redoc_url=None,
        license_info={"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
        },  # checked in every request
        lifespan=lambda app: _lifespan(store, shadow, Watcher(serving, settings.reload_seconds)),
    )

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            info = {
                "title": app.title,
                "version": app.version,
                "summary": app.summary,
                "description": app.description,
            }
            app.openapi_schema = openapi_document(
                {**info, "license": app.license_info},
                operations,
                max_jobs=settings.max_jobs,
                max_layers=settings.max_layers,
                has_keys=app.state.keys is not None,
            )
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]  # FastAPI documents this as the way to extend the description

    def gated() -> Gate:
        # The default layers of Starlette and FastAPI (errors, exit stacks of dependencies) cost 30
        # µs a request, a tenth of a response.  The gate handles the errors instead.
        limited = ProblemDocuments(
            BodyLimit(app.router, settings.max_body_bytes, settings.body_seconds)
        )
        return Gate(
            limited,
            keys=app.state.keys,
            hosts=settings.hosts(),
            fallback=lambda: serving.fallback,
            max_concurrency=settings.max_concurrency,
            rate_limit_per_second=settings.rate_limit_per_second,
            rate_burst=settings.rate_burst,
        )

    app.state.searches = searches
    app.state.keys = read_keys(
        settings
    )  # here: an invalid key must fail the start, not the first request
    app.build_middleware_stack = gated  # type: ignore[method-assign]
    return app


def read_keys(settings: Settings) -> KeyRing | None:
    """The API keys of the settings; ``None`` when there are none, and no key is required.

    Raises:
        SettingsError: names the variable and the invalid entry.
    """
    texts: dict[str, str] = {}
    if settings.api_keys:
        texts[f"{PREFIX}API_KEYS"] = settings.api_keys
    if settings.api_keys_file is not None:
        try:
            texts[f"{PREFIX}API_KEYS_FILE"] = settings.api_keys_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{PREFIX}API_KEYS_FILE {settings.api_keys_file} cannot be read: {error}"
            ) from None
    for variable, text in texts.items():
        try:
            if not parse_keys(text):
                raise ValueError("holds no key: give one, or do not set it")
        except ValueError as error:
            raise SettingsError(f"{variable} {error}") from None
    return parse_keys("\n".join(texts.values())) if texts else None


def _store(settings: Settings) -> ObservationStore | None:
    if settings.database_url.lower() == OFF:
        return None
    store = ObservationStore(
        settings.database_url or _default_database_url(),
        queue_size=settings.observation_queue,
        record_predictions=settings.record_predictions,
        prediction_retention_days=settings.prediction_retention_days,
        alarm_window=settings.alarm_window,
    )
    try:
        store.prepare()
    except DatabaseAwayError as error:
        logger.warning("observations are refused until the database can be reached: %s", error)
    return store


def _default_database_url() -> str:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(state) / "gpumemnet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{folder} cannot be made to keep observations in ({error.strerror}): "
            f"set {PREFIX}DATABASE_URL to a database, or to 'off'"
        ) from None
    return f"sqlite:///{folder / DATABASE_FILE}"


def _lifespan(
    store: ObservationStore | None, shadow: Shadow, watcher: Watcher
) -> AbstractAsyncContextManager[None]:
    @asynccontextmanager
    async def alive() -> AsyncIterator[None]:
        if store is not None:
            store.start()
        shadow.start()
        watcher.start()
        try:
            yield
        finally:
            await run_in_threadpool(watcher.stop)
            await run_in_threadpool(shadow.stop)
            if store is not None:
                await run_in_threadpool(store.drain)

    return alive()
