"""What the API's description says of the administration of models: shapes and paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from gpumemnet.registry.registry import SHIPPED

from ..api.endpoint import JSON
from ..api.problems import MEDIA_TYPE
from ..api.schemas import reference

HISTORY_SHOWN: Final = 50
MAX_REASON: Final = 500

Document = dict[str, Any]


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
