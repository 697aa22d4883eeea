"""Request and response models of the administration endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from gpumemnet.job.layers import describe
from gpumemnet.site.releases import NAME_RULE, is_release_name

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
    """A release: bundles that are served together."""

    name: str
    created: str | None = Field(
        description="when it was made (ISO 8601); null for the bundles of the package"
    )
    parent: str | None = Field(description="the release that it was made from")
    note: str
    lineage: dict[str, Any] = Field(description="how it was made: data, code, seeds")
    is_whole: bool = Field(description="whether every bundle exists and matches its checksum")
    problem: str | None = Field(
        description="what is wrong, in one sentence; null when the release is whole"
    )
    bundles: list[ReleaseBundle] = Field(
        description="its bundles; empty when the release is not whole"
    )


class ChampionChange(Schema):
    """One change of the champion."""

    champion: str
    since: str = Field(description="when it became champion (ISO 8601)")
    by: str = Field(
        description="name of the API key, or of the user on the command line; empty without keys"
    )
    reason: str
    is_rollback: bool = Field(description="whether this went back to an older champion")


class ServedModels(Schema):
    """What the worker that handled this request serves."""

    release: str = Field(description="the served release")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hash over the release's bundles")
    challenger: str | None = Field(description="the challenger in this worker")
    failure: str | None = Field(
        description="why the registry's champion is not served, in one sentence; null when it is"
    )
    challenger_failure: str | None = Field(
        description="why the registry's challenger is not used; null when it is"
    )


class AdminModels(Schema):
    """The registry, and what this worker serves."""

    has_registry: bool = Field(
        description="whether the service has a registry; without one nothing can be changed"
    )
    champion: str | None = Field(
        description="the champion: the release to be served; null without a registry"
    )
    challenger: str | None = Field(
        description="the challenger: the release to be compared in the background"
    )
    previous: str | None = Field(description="the release that a rollback goes back to")
    serving: ServedModels
    releases: list[ReleaseDetails] = Field(
        description="the releases: the shipped one first, then by age"
    )
    history: list[ChampionChange] = Field(
        description=f"the last {HISTORY_SHOWN} changes of the champion, the oldest first"
    )


def _release_name(name: str) -> str:
    if not is_release_name(name):
        raise ValueError(f"cannot be the name of a release: {NAME_RULE}")
    return name


def _one_line(reason: str) -> str:
    if not reason.isprintable():
        raise ValueError(
            f"must be one line of text of at most {MAX_REASON} characters, not {describe(reason)}"
        )
    return reason


ReleaseName = Annotated[str, AfterValidator(_release_name)]
Reason = Annotated[
    str,
    AfterValidator(_one_line),
    Field(max_length=MAX_REASON, description="reason, kept in the history"),
]


class ChampionRequest(Schema):
    """The release to serve."""

    release: ReleaseName
    reason: Reason = ""


class ChallengerRequest(Schema):
    """The release to compare with the champion in the background."""

    release: ReleaseName | None = Field(description="null removes the challenger")


class RollbackRequest(Schema):
    """The reason for going back to the previous champion."""

    reason: Reason = ""
