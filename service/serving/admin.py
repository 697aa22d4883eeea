"""Looking at the models and choosing which of them answer, over HTTP; whether the caller may is asked before it comes here.

A change is tested and done when its answer is sent, in this worker; the others follow by themselves (:mod:`service.serving.watch`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumemnet.errors import (
    BundleError,
    InvalidJobError,
    InvalidRequestError,
    RegistryBusyError,
    RegistryError,
    UnknownReleaseError,
)
from gpumemnet.job_json import parse_json
from gpumemnet.layers import describe
from gpumemnet.registry import SHIPPED, Change, Registry, Release
from service.endpoint import JSON, read_json_body, send_answer
from service.problems import CONFLICT, MEDIA_TYPE, OVERLOADED, UNKNOWN, Refusal
from service.schemas import reference
from service.serving.champion import Serving

HISTORY_SHOWN: Final = 50
MAX_REASON: Final = 500

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

    return [
        Route("/v1/admin/models", _reading(serving), methods=["GET"]),
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
        logger.info("%s %s by %s", scope["path"], orjson.dumps(document).decode(), caller or "nobody named")
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
            raise InvalidRequestError(f"cannot answer: {error}", "release") from None


def _reading(serving: Serving) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_answer(send, 200, JSON, await run_in_threadpool(_models, serving))

    return _Application(answer)


class _Application:
    """A function as an object: Starlette takes a plain function for something else than an ASGI application."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


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
    return orjson.dumps(
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
            "history": [_change_document(change) for change in aliases.history[-HISTORY_SHOWN:]],
        }
    )


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


def _change_document(change: Change) -> Document:
    return {
        "champion": change.champion,
        "since": change.since,
        "by": change.by,
        "reason": change.reason,
        "is_rollback": change.is_rollback,
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
    if not isinstance(release, str):
        raise InvalidRequestError(f"must be the name of a release{' or null' * is_nullable}, not {describe(release)}", "release")
    return release


def _reason(document: Mapping[str, Any]) -> str:
    reason = document.get("reason", "")
    if not isinstance(reason, str) or len(reason) > MAX_REASON:
        raise InvalidRequestError(f"must be a text of at most {MAX_REASON} characters, not {describe(reason)}", "reason")
    return reason


def _caller(scope: Scope) -> str:
    """The name of the key that the gate let pass, where keys are asked for."""
    name = scope.get("state", {}).get("key_name", "")
    return name if isinstance(name, str) else ""


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReleaseBundle(_Shape):
    """One bundle of a release."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    name: str
    version: str
    family: str
    encoder: str


class ReleaseDetails(_Shape):
    """A release: the bundles that answer together."""

    name: str
    created: str | None = Field(description="when it was made (ISO 8601); null for the bundles of the package")
    parent: str | None = Field(description="the release that it was made from")
    note: str
    lineage: dict[str, Any] = Field(description="what made it, as its maker says: data, code, seeds")
    is_whole: bool = Field(description="whether every bundle is there and has its checksum")
    problem: str | None = Field(description="what is wrong, in a sentence, where it is not whole")
    bundles: list[ReleaseBundle] = Field(description="its bundles; empty where it is not whole")


class ChampionChange(_Shape):
    """One change of the champion."""

    champion: str
    since: str = Field(description="when it became champion (ISO 8601)")
    by: str = Field(description="name of the key, or of the user at the command line; empty where nobody was asked for one")
    reason: str
    is_rollback: bool = Field(description="whether this went back to an older champion")


class ServedModels(_Shape):
    """What the worker that answered this request does."""

    release: str = Field(description="the release that answers")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hash over the release's bundles")
    challenger: str | None = Field(description="the release that is asked beside it")
    failure: str | None = Field(description="why the champion does not answer, in a sentence; null when it does")
    challenger_failure: str | None = Field(description="why the challenger is not asked")


class AdminModels(_Shape):
    """The registry and what is made of it."""

    has_registry: bool = Field(description="whether the service has a registry; without one nothing can be changed")
    champion: str | None = Field(description="the release that should answer; null without a registry")
    challenger: str | None = Field(description="the release that should be asked beside it")
    previous: str | None = Field(description="the release that a rollback goes back to")
    serving: ServedModels
    releases: list[ReleaseDetails] = Field(description="the shipped release first, then by age")
    history: list[ChampionChange] = Field(description=f"the last {HISTORY_SHOWN} changes of the champion, the oldest first")


class ChampionRequest(_Shape):
    """Which release shall answer."""

    release: str
    reason: str = Field(default="", max_length=MAX_REASON, description="why; it stays in the history")


class ChallengerRequest(_Shape):
    """Which release shall be asked beside the champion."""

    release: str | None = Field(description="null for none")


class RollbackRequest(_Shape):
    """Why the champion before this one shall answer again."""

    reason: str = Field(default="", max_length=MAX_REASON, description="why; it stays in the history")


ADMIN_SHAPES: Final[tuple[type[BaseModel], ...]] = (AdminModels, ChampionRequest, ChallengerRequest, RollbackRequest)


def admin_paths() -> Document:
    """What the API's description says of these routes."""
    release = {"release": SHIPPED, "reason": "the new one is too high for CNNs"}
    return {
        "/v1/admin/models": {"get": _operation("admin_models", "Releases, aliases and what this worker answers from", None, {})},
        "/v1/admin/models/champion": {
            "put": _operation(
                "set_champion", "Let a release answer: tested first, and done when this is answered", "ChampionRequest", release
            )
        },
        "/v1/admin/models/challenger": {
            "put": _operation(
                "set_challenger", "Let a release be asked beside the champion, or none", "ChallengerRequest", {"release": None}
            )
        },
        "/v1/admin/models/rollback": {
            "post": _operation(
                "roll_back", "Let the champion before this one answer again", "RollbackRequest", {"reason": release["reason"]}
            )
        },
    }


def _operation(name: str, summary: str, request: str | None, example: Mapping[str, Any]) -> Document:
    answer = {"200": {"description": "What there is now.", "content": {JSON: {"schema": reference("AdminModels")}}}}
    operation: Document = {"tags": ["admin"], "summary": summary, "operationId": name, "responses": answer}
    if request is not None:
        content = {JSON: {"schema": reference(request), "example": dict(example)}}
        operation["requestBody"] = {"required": request != "RollbackRequest", "content": content}
        operation["responses"] = answer | {
            "404": _problem("There is no release of this name."),
            "409": _problem("There is no registry, or it refuses: nothing has changed."),
            "413": _problem("The body is too large."),
            "415": _problem("The body is not declared as application/json."),
            "422": _problem("A field is at fault, or the release is damaged or fails its self-test: nothing has changed."),
            "503": _problem("Another process is writing to the registry."),
        }
    return operation


def _problem(meaning: str) -> Document:
    return {"description": meaning, "content": {MEDIA_TYPE: {"schema": reference("Problem")}}}
