"""The application: settings in, ASGI application out."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from gpumemnet.predictor import Predictor
from service.answers import Answerer
from service.limits import BodyLimit
from service.openapi import install_description
from service.problems import install_problem_handlers
from service.routes import install_routes, prediction_routes
from service.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The service with its models loaded and tried.

    Raises:
        BundleError: when a bundle cannot be loaded or does not answer.
    """
    predictor = Predictor.load(*settings.bundles) if settings.bundles else Predictor.default()
    answerer = Answerer(predictor, settings.max_jobs)
    app = FastAPI(
        routes=prediction_routes(answerer),
        title="gpumemnet",
        version=version("gpumemnet"),
        summary="How much GPU memory a training job will take, before it starts.",
        description=(
            "Memory is that of the process as nvidia-smi shows it, CUDA context included. Names end in their unit: `_bytes`, "
            "or `_mib` for 2**20 bytes, rounded up. Every error is a problem document (RFC 9457)."
        ),
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        license_info={"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    install_routes(app, answerer)
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)
    install_problem_handlers(app)
    install_description(app, answerer, settings)
    return app
