"""The administration endpoints: list the models, and choose which of them are served.  The gate has
checked the caller's key.

A change is tested and complete in this worker when its response is sent.  The other workers follow
the registry (:mod:`service.serving.watch`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Generic, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from gpumemnet.errors import (
    BundleError,
    InvalidRequestError,
    RegistryBusyError,
    RegistryError,
    UnknownReleaseError,
)
from gpumemnet.site.releases import SHIPPED, Registry, Release

from ..api.endpoint import read_json_body, send_response
from ..api.operations import BODY_REFUSALS, JSON, Answer, Operation
from ..api.problems import CONFLICT, OVERLOADED, UNKNOWN, Refusal
from ..api.requests import read_request
from ..api.schemas import Schema
from ..serving.served_release import ServedRelease
from .schemas import HISTORY_SHOWN, AdminModels, ChallengerRequest, ChampionRequest, RollbackRequest

logger = logging.getLogger("gpumemnet.service")

Document = dict[str, Any]
S = TypeVar("S", bound=Schema)


_REFUSALS: Final = {
    404: "No release has this name.",
    409: "There is no registry, or it refuses the change; nothing has changed.",
    **BODY_REFUSALS,
    422: "A field is invalid, or the release is damaged or fails its self-test; nothing has changed.",
    503: "The service is busy, or another process is writing to the registry.",
}
_ANSWERS: Final = {200: Answer(shape=AdminModels, meaning="The registry after the request.")}


def admin_operations(serving: ServedRelease) -> list[Operation]:
    """The operations below ``/v1/admin``."""

    def promote(request: ChampionRequest, caller: str) -> None:
        serving.promote(request.release, by=caller, reason=request.reason)

    def challenge(request: ChallengerRequest, caller: str) -> None:
        serving.set_challenger(request.release)

    def roll_back(request: RollbackRequest, caller: str) -> None:
        serving.roll_back(by=caller, reason=request.reason)

    def change(
        method: str,
        path: str,
        name: str,
        summary: str,
        shape: type[Schema],
        apply: Any,
        example: Any,
    ) -> Operation:
        return Operation(
            method=method,
            path=f"/v1/admin/models/{path}",
            name=name,
            tag="admin",
            summary=summary,
            endpoint=_Change(serving, shape, apply),
            request=shape,
            is_body_required=shape is not RollbackRequest,
            request_examples=lambda: {"change": example},
            answers=_ANSWERS,
            refusals=_REFUSALS,
        )

    reason = "the new one is too high for CNNs"
    return [
        Operation(
            method="GET",
            path="/v1/admin/models",
            name="admin_models",
            tag="admin",
            summary="List the releases, and which of them are served",
            endpoint=_Models(serving),
            answers=_ANSWERS,
        ),
        change(
            *("PUT", "champion", "set_champion", "Test a release and make it the champion"),
            *(ChampionRequest, promote, {"release": SHIPPED, "reason": reason}),
        ),
        change(
            *("PUT", "challenger", "set_challenger", "Set or remove the challenger"),
            *(ChallengerRequest, challenge, {"release": None}),
        ),
        change(
            *("POST", "rollback", "roll_back", "Go back to the previous champion"),
            *(RollbackRequest, roll_back, {"reason": reason}),
        ),
    ]


class _Models:
    """ASGI application of ``GET /v1/admin/models``."""

    def __init__(self, serving: ServedRelease) -> None:
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        await send_response(send, 200, JSON, await run_in_threadpool(_models, self._serving))


class _Change(Generic[S]):
    """ASGI application that changes the served release and responds with the new state."""

    def __init__(
        self, serving: ServedRelease, shape: type[S], change: Callable[[S, str], None]
    ) -> None:
        self._serving = serving
        self._shape = shape
        self._change = change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the change that the body requests.

        Raises:
            HTTPException: 415 when the body is not declared as JSON.
            InvalidRequestError: when a field is invalid, or the release fails its self-test.
            Refusal: when there is no registry or no such release, or the registry refuses.
        """
        is_required = self._shape is not RollbackRequest
        body = await read_json_body(scope, receive, is_required=is_required)
        if body is None:
            return
        if self._serving.registry is None:
            raise Refusal(
                CONFLICT,
                "there is no registry to choose releases from: start the service with GPUMEMNET_REGISTRY set to a folder",
            )
        request = read_request(body if body.strip() or is_required else b"{}", self._shape)
        caller = _caller(scope)
        await run_in_threadpool(self._apply, request, caller)
        logger.info(
            "%s %s by %s", scope["path"], json.dumps(request.model_dump()), caller or "nobody named"
        )
        await send_response(send, 200, JSON, await run_in_threadpool(_models, self._serving))

    def _apply(self, request: S, caller: str) -> None:
        try:
            self._change(request, caller)
        except UnknownReleaseError as error:
            raise Refusal(UNKNOWN, str(error)) from None
        except RegistryBusyError as error:
            raise Refusal(OVERLOADED, str(error), {"Retry-After": "5"}) from None
        except RegistryError as error:
            raise Refusal(CONFLICT, str(error)) from None
        except BundleError as error:
            if isinstance(request, RollbackRequest):
                raise Refusal(
                    CONFLICT, f"the champion before this one cannot answer: {error}"
                ) from None
            raise InvalidRequestError(f"cannot answer: {error}", "release") from None


def _models(serving: ServedRelease) -> bytes:
    """The response to ``GET /v1/admin/models``: the registry as it is now, and the state of this
    worker."""
    registry, failure = serving.registry, serving.failure
    aliases, releases = serving.aliases, []
    if registry is not None:
        try:
            aliases = registry.aliases()
            releases = [_release_document(registry, release) for release in registry.releases()]
        except BundleError as error:
            failure = str(error)
    return json.dumps(  # not orjson: a lineage may hold integers of any size
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


def _caller(scope: Scope) -> str:
    """The name of the API key that the gate accepted, when keys are required."""
    name = scope.get("state", {}).get("key_name", "")
    return name if isinstance(name, str) else ""
