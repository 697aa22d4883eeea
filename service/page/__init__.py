"""The routes of the start page and of the API documentation.

Every file has its own route, fixed when the application is made: no request path ever reaches the
file system. Swagger UI comes from the package ``swagger_ui_bundle``, so that the documentation
needs no other host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]

SWAGGER_FILES: Final = ("swagger-ui.css", "swagger-ui-bundle.js")
"""The files of Swagger UI that the documentation needs."""

CONTENT_SECURITY_POLICY: Final = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Content security policy: nothing from other hosts, nothing inline, no framing; the page sends its
form by script."""

_DOCS_POLICY: Final = f"{CONTENT_SECURITY_POLICY}; img-src 'self' data:"
"""Swagger UI's style sheet embeds its images as ``data:`` URIs."""
_OWN: Final = Path(__file__).parent


def page_routes() -> list[BaseRoute]:
    """``/`` and the page's files below ``/page/``; they need no API key, because they hold nothing
    secret."""
    routes = _folder_routes("/page", _OWN / "files") + _folder_routes(
        "/page/examples", _OWN / "examples"
    )
    return [_route("/", "page", _OWN / "files" / "index.html"), *routes]


def docs_routes() -> list[BaseRoute]:
    """``/docs`` and its files below ``/docs/``; the OpenAPI document is at ``/openapi.json``."""
    return [
        _route("/docs", "docs", _OWN / "docs" / "docs.html", _DOCS_POLICY),
        *_folder_routes("/docs", _OWN / "docs"),
        *(
            _route(f"/docs/{name}", f"docs:{name}", Path(swagger_ui_path) / name)
            for name in SWAGGER_FILES
        ),
    ]


def _folder_routes(path: str, folder: Path) -> list[BaseRoute]:
    """Routes of a folder's files, except HTML pages, which have their own address."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix != ".html")
    return [_route(f"{path}/{file.name}", f"{path[1:]}:{file.name}", file) for file in files]


def _route(path: str, name: str, file: Path, policy: str = CONTENT_SECURITY_POLICY) -> Route:
    """The route of one file.  The browser revalidates it each time, so that a new release is visible
    at once."""
    files = StaticFiles(directory=file.parent)

    async def respond(request: Request) -> Response:
        response = await files.get_response(file.name, request.scope)
        response.headers.update(
            {
                "cache-control": "no-cache",
                "content-security-policy": policy,
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
            }
        )
        return response

    return Route(path, respond, methods=["GET"], name=name, include_in_schema=False)
