"""What ``GET /metrics`` says: everything that is documented, nothing that is not, and the truth."""

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gpumemnet.atomic_files import Document
from tests.conftest import RunningService

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Name and labels → value."""


def scrape(url: str) -> Samples:
    answer = httpx.get(f"{url}/metrics", timeout=300)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = [
        sample
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    ]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def counted(url: str, before: Samples) -> Samples:
    """What has been counted since ``before``."""
    now = scrape(url)
    return {key: now[key] - before.get(key, 0.0) for key in now if now[key] != before.get(key)}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_metric_is_documented_and_nothing_else_is(service: RunningService) -> None:
    documented = set(re.findall(r"^\| `(gpumemnet_\w+)`", DOCUMENTATION.read_text(), re.MULTILINE))
    exposed = set(
        re.findall(r"^# HELP (\S+)", httpx.get(f"{service.url}/metrics").text, re.MULTILINE)
    )
    assert exposed == documented


def test_requests_are_counted_by_path_and_status(service: RunningService, job: Document) -> None:
    before = scrape(service.url)
    with httpx.Client(base_url=service.url) as client:
        for _ in range(3):
            client.post("/v1/predict", json={"job": job})
        client.post("/v1/predict", json={"job": 1})
        client.post("/v1/predict/batch", json={"jobs": [job] * 5})
        for number in range(30):
            client.get(f"/made/up/{number}")
            client.get(f"/page/{number}")
    samples = counted(service.url, before)
    assert value(samples, "gpumemnet_requests_total", path="/v1/predict", status="200") == 3
    assert value(samples, "gpumemnet_requests_total", path="/v1/predict", status="422") == 1
    assert value(samples, "gpumemnet_request_seconds_count", path="/v1/predict") == 4
    assert value(samples, "gpumemnet_requests_total", path="{other}", status="404") == 30
    assert value(samples, "gpumemnet_requests_total", path="/page/{file}", status="404") == 30
    assert (
        value(samples, "gpumemnet_predictions_total", family=job["family"], in_support="true") == 8
    )
    paths = {dict(labels)["path"] for name, labels in samples if name == "gpumemnet_requests_total"}
    assert paths == {"/v1/predict", "/v1/predict/batch", "{other}", "/page/{file}", "/metrics"}


def test_refusals_are_counted_by_problem(service: RunningService) -> None:
    before = scrape(service.url)
    assert httpx.post(f"{service.url}/v1/predict", content="x").status_code == 415
    refused = counted(service.url, before)
    assert value(refused, "gpumemnet_refusals_total", problem="unsupported-media-type") == 1
