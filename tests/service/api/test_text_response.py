"""Plain text for shell scripts, asked for as they do: by curl, which must fail where there is no
number."""

import httpx
import pytest

from gpumemnet.atomic_files import Document
from gpumemnet.units import ceil_mib

JSON = {"Content-Type": "application/json"}


def ask(
    http: httpx.Client, job: Document, accept: str, path: str = "/v1/predict"
) -> httpx.Response:
    return http.post(path, json={"job": job}, headers={"Accept": accept})


def outside(job: Document) -> Document:
    return {**job, "gradient_accumulation": 64}


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain",
        "Text/Plain; charset=utf-8",
    ],
)
def test_the_answer_is_the_limit(http: httpx.Client, job: Document, accept: str) -> None:
    response = ask(http, job, accept)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    safe_bytes = ask(http, job, "application/json").json()["safe_bytes"]
    assert response.text == f"{ceil_mib(safe_bytes)}\n"


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "application/json",
        "",
        "text/html",
        "text/plain;q=0.1, */*",
        "text/plain, */*",
        "text/plain, application/json;q=0.9",
        ",;",
    ],
)
def test_json_unless_plain_text_is_preferred(
    http: httpx.Client, job: Document, accept: str
) -> None:
    response = ask(http, job, accept)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "query",
    [
        "field=request_mib,limit_mib,expected_bytes",
        "field=request_mib&field=limit_mib,expected_bytes",
    ],
)
def test_the_fields_that_are_asked_for(http: httpx.Client, job: Document, query: str) -> None:
    answer = ask(http, job, "*/*").json()
    words = ask(http, job, "text/plain", f"/v1/predict?{query}").text.split()
    amounts = ceil_mib(answer["expected_bytes"]), ceil_mib(answer["safe_bytes"])
    assert words == [str(amount) for amount in (*amounts, answer["expected_bytes"])]


def test_the_id_for_an_observation(http: httpx.Client, job: Document) -> None:
    limit, identity = ask(
        http, job, "text/plain", "/v1/predict?field=limit_mib,prediction_id"
    ).text.split()
    assert limit.isdigit()
    assert len(identity) == 36


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("field=limit", "field"),
        ("field=", "field"),
        ("field=model", "field"),
        ("fields=limit_mib", "'fields'"),
    ],
)
@pytest.mark.parametrize("accept", ["text/plain", "*/*"])
def test_a_field_that_there_is_not(
    http: httpx.Client, job: Document, query: str, field: str, accept: str
) -> None:
    response = ask(http, job, accept, f"/v1/predict?{query}")
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field


def test_outside_the_support_there_is_a_problem_and_still_a_request(
    http: httpx.Client, job: Document
) -> None:
    response = ask(http, outside(job), "text/plain")
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["type"] == "urn:gpumemnet:problem:outside-support"
    assert "gradient_accumulation is" in document["detail"]
    assert (
        ask(http, outside(job), "text/plain", "/v1/predict?field=request_mib")
        .text.strip()
        .isdigit()
    )


def test_errors_are_problems_whatever_is_accepted(http: httpx.Client) -> None:
    response = http.post("/v1/predict", content=b"{", headers={**JSON, "Accept": "text/plain"})
    assert (response.status_code, response.headers["content-type"]) == (
        422,
        "application/problem+json",
    )
