"""The page over plain HTTP: what is sent, with which headers, and that its example jobs are
answered."""

import re

import httpx
import pytest
from starlette.routing import Route

from gpumemnet.job.json_codec import job_from_dict
from service.page import docs_routes, page_routes

FILES = sorted(route.path for route in [*page_routes(), *docs_routes()] if isinstance(route, Route))
EXAMPLES = sorted(path for path in FILES if path.startswith("/page/examples/"))
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}


@pytest.mark.parametrize("path", FILES)
def test_every_file_is_sent_with_its_type_and_security_headers(
    http: httpx.Client, path: str
) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    suffix = path.rpartition(".")[2] if "." in path else "html"
    assert answer.headers["content-type"] == TYPES[suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/docs/swagger-ui-bundle.js"])
def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx.Client, path: str) -> None:
    tag = http.get(path).headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    for held in (tag, f"W/{tag}", f'"other", {tag}'):
        answer = http.get(path, headers={"If-None-Match": held})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", EXAMPLES)
def test_example_jobs_are_answered(http: httpx.Client, path: str) -> None:
    job = http.get(path).json()
    job_from_dict(job)
    answer = http.post("/v1/predict", json={"job": job}).raise_for_status().json()
    assert answer["safe_bytes"] >= answer["expected_bytes"]
    assert answer["in_support"] or answer["reasons"]
