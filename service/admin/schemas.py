"""Request and response models of the administration endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from gpumemnet.job.layers import describe
from gpumemnet.registry.registry import NAME_RULE, is_release_name

from ..api.schemas import Schema

HISTORY_SHOWN: Final = 50
MAX_REASON: Final = 500


class ReleaseBundle(Schema):
    """One bundle of a release."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    name: str
    version: str
    family: str
    encoder: str


class ReleaseDetails(Schema):
    """A release: the bundles that answer together."""

    name: str
    created: str | None = Field(description="when it was made (ISO 8601); null for the bundles of the package")
    parent: str | None = Field(description="the release that it was made from")
    note: str
    lineage: dict[str, Any] = Field(description="what made it, as its maker says: data, code, seeds")
    is_whole: bool = Field(description="whether every bundle is there and has its checksum")
    problem: str | None = Field(description="what is wrong, in a sentence, where it is not whole")
    bundles: list[ReleaseBundle] = Field(description="its bundles; empty where it is not whole")


class ChampionChange(Schema):
    """One change of the champion."""

    champion: str
    since: str = Field(description="when it became champion (ISO 8601)")
    by: str = Field(description="name of the key, or of the user at the command line; empty where nobody was asked for one")
    reason: str
    is_rollback: bool = Field(description="whether this went back to an older champion")


class ServedModels(Schema):
    """What the worker that answered this request does."""

    release: str = Field(description="the release that answers")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hash over the release's bundles")
    challenger: str | None = Field(description="the release that is asked beside it")
    failure: str | None = Field(description="why the champion does not answer, in a sentence; null when it does")
    challenger_failure: str | None = Field(description="why the challenger is not asked")


class AdminModels(Schema):
    """The registry and what is made of it."""

    has_registry: bool = Field(description="whether the service has a registry; without one nothing can be changed")
    champion: str | None = Field(description="the release that should answer; null without a registry")
    challenger: str | None = Field(description="the release that should be asked beside it")
    previous: str | None = Field(description="the release that a rollback goes back to")
    serving: ServedModels
    releases: list[ReleaseDetails] = Field(description="the shipped release first, then by age")
    history: list[ChampionChange] = Field(description=f"the last {HISTORY_SHOWN} changes of the champion, the oldest first")


def _release_name(name: str) -> str:
    if not is_release_name(name):
        raise ValueError(f"cannot be the name of a release: {NAME_RULE}")
    return name


def _one_line(reason: str) -> str:
    if not reason.isprintable():
        raise ValueError(f"must be one line of text of at most {MAX_REASON} characters, not {describe(reason)}")
    return reason


ReleaseName = Annotated[str, AfterValidator(_release_name)]
Reason = Annotated[str, AfterValidator(_one_line), Field(max_length=MAX_REASON, description="why; it stays in the history")]


class ChampionRequest(Schema):
    """Which release shall answer."""

    release: ReleaseName
    reason: Reason = ""


class ChallengerRequest(Schema):
    """Which release shall be asked beside the champion."""

    release: ReleaseName | None = Field(description="null for none")


class RollbackRequest(Schema):
    """Why the champion before this one shall answer again."""

    reason: Reason = ""
