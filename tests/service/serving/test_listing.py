"""The list of releases says what is wrong where one cannot be read, as while an upgrade replaces
the shipped bundles."""

import json
from pathlib import Path

import pytest

from gpumemnet.errors import BundleError
from gpumemnet.site.releases import Registry, Release
from service.admin.routes import _models
from service.api.predictions import PredictionApi
from service.serving.served_release import ServedRelease


def test_a_release_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = ServedRelease(
        lambda predictor, release: PredictionApi(predictor, 10, None, release),
        registry=Registry(tmp_path),
    )

    def unreadable(registry: Registry) -> tuple[Release, ...]:
        raise BundleError("card.json: does not match its checksum")

    monkeypatch.setattr(Registry, "releases", unreadable)
    listed = json.loads(_models(serving))
    assert listed["serving"]["failure"] == "card.json: does not match its checksum"
    assert listed["releases"] == []
