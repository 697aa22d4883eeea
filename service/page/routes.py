"""The routes of the page and of the API's documentation.

Every file has a route of its own, known when the application is made: no path of a request ever reaches the file system.
Swagger UI comes from the package ``swagger_ui_bundle``, so that the documentation needs no other host.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from starlette.routing import BaseRoute, Route
from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]

from .static_file import CONTENT_SECURITY_POLICY, MEDIA_TYPES, StaticFile

SWAGGER_FILES: Final = ("swagger-ui.css", "swagger-ui-bundle.js")
"""What the documentation needs of Swagger UI."""

_DOCS_POLICY: Final = f"{CONTENT_SECURITY_POLICY}; img-src 'self' data:"
"""Swagger UI's style sheet holds its small pictures as ``data:`` URIs."""


def page_routes() -> list[BaseRoute]:
    """``/`` and the files of the page below ``/page/``; readable without an API key, because they hold nothing secret."""
    own = resources.files(__package__)
    routes = _folder_routes("/page", own / "files") + _folder_routes("/page/examples", own / "examples")
    return [_route("/", "page", own / "files" / "index.html"), *routes]


def docs_routes() -> list[BaseRoute]:
    """``/docs`` and its files below ``/docs/``; the description itself stays at ``/openapi.json``."""
    own = resources.files(__package__) / "docs"
    return [
        _route("/docs", "docs", own / "docs.html", _DOCS_POLICY),
        *_folder_routes("/docs", own),
        *(_route(f"/docs/{name}", f"docs:{name}", swagger_ui_path / name) for name in SWAGGER_FILES),
    ]


def _folder_routes(path: str, folder: Traversable) -> list[BaseRoute]:
    """Routes of a folder's files, but for its pages, which have an address of their own."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    served = [name for name in names if f".{name.rpartition('.')[2]}" in MEDIA_TYPES and not name.endswith(".html")]
    return [_route(f"{path}/{name}", f"{path[1:]}:{name}", folder / name) for name in served]


def _route(path: str, name: str, file: Traversable, policy: str = CONTENT_SECURITY_POLICY) -> Route:
    return Route(path, StaticFile(file.name, file.read_bytes(), policy), methods=["GET"], name=name, include_in_schema=False)
