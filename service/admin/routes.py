"""Looking at the models and choosing which of them answer, over HTTP; whether the caller may is asked before it comes here.

A change is tested and done when its answer is sent, in this worker; the others follow by themselves
(:mod:`service.admin.watch`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gpumemnet.errors import (
    BundleError,
    InvalidJobError,
    InvalidRequestError,
    RegistryBusyError,
    RegistryError,
    UnknownReleaseError,
)
from gpumemnet.job.json_codec import parse_json
from gpumemnet.job.layers import describe
from gpumemnet.registry.registry import NAME_RULE, Registry, Release, is_release_name

from ..api.endpoint import JSON, read_json_body, send_answer
from ..api.problems import CONFLICT, OVERLOADED, UNKNOWN, Refusal
from .champion import Serving
from .description import HISTORY_SHOWN, MAX_REASON

logger = logging.getLogger("gpumemnet.service")

Document = dict[str, Any]


def admin_routes(serving: Serving) -> list[BaseRoute]:
    """The routes under ``/v1/admin``."""

    def promote(document: Mapping[str, Any], caller: str) -> None:
        release = _release(document)
        assert release is not None
        serving.promote(release, by=caller, reason=_reason(document))

    def challenge(document: Mapping[str, Any], caller: str) -> None:
        serving.set_challenger(_release(document, is_nullable=True))

    def roll_back(document: Mapping[str, Any], caller: str) -> None:
        serving.roll_back(by=caller, reason=_reason(document))

    async def models(request: Request) -> Response:
        return Response(await run_in_threadpool(_models, serving), media_type=JSON)

    return [
        Route("/v1/admin/models", models, methods=["GET"]),
        Route("/v1/admin/models/champion", _Change(serving, promote, ("release", "reason")), methods=["PUT"]),
        Route("/v1/admin/models/challenger", _Change(serving, challenge, ("release",)), methods=["PUT"]),
        Route("/v1/admin/models/rollback", _Change(serving, roll_back, ("reason",)), methods=["POST"]),
    ]


class _Change:
    """ASGI application that changes what answers, and answers with what there is then."""

    def __init__(self, serving: Serving, change: Callable[[Mapping[str, Any], str], None], fields: tuple[str, ...]) -> None:
        self._serving = serving
        self._change = change
        self._fields = fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Change what the body asks for.

        Raises:
            HTTPException: 415 when the body is not declared as JSON.
            InvalidRequestError: when a field is at fault, or the release fails its self-test.
            Refusal: when there is no registry or no such release, or the registry refuses.
        """
        body = await read_json_body(scope, receive)
        if body is None:
            return
        if self._serving.registry is None:
            raise Refusal(
                CONFLICT,
                "there is no registry to choose releases from: start the service with GPUMEMNET_REGISTRY set to a folder",
            )
        document = _document(body, self._fields)
        caller = _caller(scope)
        await run_in_threadpool(self._apply, document, caller)
        logger.info("%s %s by %s", scope["path"], json.dumps(document), caller or "nobody named")
        await send_answer(send, 200, JSON, await run_in_threadpool(_models, self._serving))

    def _apply(self, document: Mapping[str, Any], caller: str) -> None:
        try:
            self._change(document, caller)
        except UnknownReleaseError as error:
            raise Refusal(UNKNOWN, str(error)) from None
        except RegistryBusyError as error:
            raise Refusal(OVERLOADED, str(error), {"Retry-After": "5"}) from None
        except RegistryError as error:
            raise Refusal(CONFLICT, str(error)) from None
        except BundleError as error:
            if "release" in self._fields:
                raise InvalidRequestError(f"cannot answer: {error}", "release") from None
            raise Refusal(CONFLICT, f"the champion before this one cannot answer: {error}") from None


def _models(serving: Serving) -> bytes:
    """The answer to ``GET /v1/admin/models``: the registry as it is now, and what this worker does."""
    registry, failure = serving.registry, serving.failure
    aliases, releases = serving.aliases, []
    if registry is not None:
        try:
            aliases = registry.aliases()
            releases = [_release_document(registry, release) for release in registry.releases()]
        except RegistryError as error:
            failure = str(error)
    return json.dumps(  # not orjson: a lineage may hold whole numbers of any size
        {
            "has_registry": registry is not None,
            "champion": aliases.champion if registry is not None else None,
            "challenger": aliases.challenger,
            "previous": aliases.previous,
            "serving": {
                "release": serving.release,
                "sha256": serving.sha256,
                "challenger": serving.challenger,
                "failure": failure,
                "challenger_failure": serving.challenger_failure,
            },
            "releases": releases,
            "history": [asdict(change) for change in aliases.history[-HISTORY_SHOWN:]],
        }
    ).encode()


def _release_document(registry: Registry, release: Release) -> Document:
    bundles, problem = [], None
    try:
        bundles = [
            {"sha256": one.sha256, "name": one.card.name, "version": one.card.version}
            | {"family": one.card.family, "encoder": one.card.encoder}
            for one in registry.load(release.name)
        ]
    except BundleError as error:
        problem = str(error)
    return {
        "name": release.name,
        "created": release.created,
        "parent": release.parent,
        "note": release.note,
        "lineage": dict(release.lineage),
        "is_whole": problem is None,
        "problem": problem,
        "bundles": bundles,
    }


def _document(body: bytes, fields: tuple[str, ...]) -> Document:
    if not body.strip() and "release" not in fields:
        return {}
    try:
        document = parse_json(body)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None
    if not isinstance(document, dict):
        raise InvalidRequestError(f"must be a JSON object with {' and '.join(fields)}, not {describe(document)}", "body")
    for name in document:
        if name not in fields:
            raise InvalidRequestError(f"is not a field: known fields are {', '.join(fields)}", name[:64])
    return document


def _release(document: Mapping[str, Any], *, is_nullable: bool = False) -> str | None:
    if "release" not in document:
        raise InvalidRequestError("is missing: name the release", "release")
    release = document["release"]
    if release is None and is_nullable:
        return None
    if not is_release_name(release):
        raise InvalidRequestError(f"cannot be the name of a release{' or null' * is_nullable}: {NAME_RULE}", "release")
    assert isinstance(release, str)
    return release


def _reason(document: Mapping[str, Any]) -> str:
    reason = document.get("reason", "")
    if not isinstance(reason, str) or len(reason) > MAX_REASON or not reason.isprintable():
        raise InvalidRequestError(
            f"must be one line of text of at most {MAX_REASON} characters, not {describe(reason)}", "reason"
        )
    return reason


def _caller(scope: Scope) -> str:
    """The name of the key that the gate let pass, where keys are asked for."""
    name = scope.get("state", {}).get("key_name", "")
    return name if isinstance(name, str) else ""
