"""Requests that come in at the same time are answered in one go, and each gets the answer that it would get alone."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from gpumemnet.errors import FieldError, InvalidJobError
from gpumemnet.predict.predictor import Predictor
from service.api.answers import Answerer
from service.api.examples import EXAMPLE_JOBS
from service.api.microbatch import Together
from service.api.problems import field_problem
from service.middleware.limits import LEAST_TOGETHER
from service.middleware.load import Load

MLP = EXAMPLE_JOBS["mlp"]
ANSWERER = Answerer(Predictor.default(), max_jobs=10)
QUESTIONS: Sequence[bytes] = [
    *(json.dumps({"job": {**MLP, "batch_size": size}}).encode() for size in range(1, 20)),
    *(json.dumps({"job": job}).encode() for job in EXAMPLE_JOBS.values()),
    json.dumps({"job": MLP, "coverage": 0.95, "fits": ["A100"]}).encode(),
    json.dumps({"job": {**MLP, "batch_size": 0}}).encode(),
    json.dumps({"job": {**MLP, "layers": [{"kind": "relu", "activations": -1}]}}).encode(),
    json.dumps({"job": {**MLP, "family": "tree"}}).encode(),
    json.dumps({"job": {**MLP, "family": ["mlp"]}}).encode(),
    json.dumps({"job": 7}).encode(),
    json.dumps({"job": MLP, "colour": "blue"}).encode(),
    b"{",
    b'{"job": {"family": "mlp"}}',
]


def _alone(body: bytes) -> dict[str, Any]:
    try:
        return _plain(ANSWERER.predict(body))
    except FieldError as error:
        return field_problem(error)


def _plain(answer: bytes) -> dict[str, Any]:
    """The answer without its id, its numbers but for the rounding of transformer-based models, which depends on the company."""
    document: dict[str, Any] = json.loads(answer)
    document.pop("prediction_id", None)
    for name, value in document.items():
        if name.endswith(("_mib", "_bytes")) and value is not None:
            document[name] = pytest.approx(value, rel=1e-5, abs=1)
    if document["margin"] is not None:
        document["margin"]["mib"] = pytest.approx(document["margin"]["mib"], abs=2)
    for fit in document.get("fits", ()):
        for name in ("request_mib", "limit_mib"):
            fit[name] = pytest.approx(fit[name], rel=1e-5, abs=1)
        fit["probability"] = pytest.approx(fit["probability"], abs=1e-4)
    document["bins"]["probabilities"] = pytest.approx(document["bins"]["probabilities"], abs=1e-4)
    document["bin"]["probability"] = pytest.approx(document["bin"]["probability"], abs=1e-4)
    return document


def test_each_question_is_answered_as_it_is_alone() -> None:
    answers = ANSWERER.predict_together(QUESTIONS)
    for body, answer in zip(QUESTIONS, answers, strict=True):
        found = field_problem(answer) if isinstance(answer, FieldError) else json.loads(answer)
        found.pop("prediction_id", None)
        assert found == _alone(body), body


def test_a_busy_service_answers_everyone_their_own(service: Any) -> None:
    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(QUESTIONS))
        async with httpx.AsyncClient(base_url=service.url, timeout=300, limits=limits) as client:
            post = [
                client.post("/v1/predict", content=body, headers={"Content-Type": "application/json"}) for body in 5 * QUESTIONS
            ]
            return await asyncio.gather(*post)

    ids = set()
    for body, response in zip(5 * QUESTIONS, asyncio.run(ask()), strict=True):
        expected, found = _alone(body), response.json()
        if response.status_code == 200:
            ids.add(found.pop("prediction_id"))
            assert {**found, "release": "shipped"} == {**expected, "release": "shipped"}, body
        else:
            assert response.status_code == 422
            assert (found["detail"], found.get("field")) == (expected["detail"], expected.get("field")), body
    assert len(ids) == 5 * (len(QUESTIONS) - 8)


class Answers:
    """Answers a body with itself and notes in which company it was."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.companies: list[int] = []

    def one(self, body: bytes) -> bytes:
        self.companies.append(1)
        if body == b"bad":
            raise InvalidJobError("is bad", "batch_size")
        return body

    def many(self, bodies: Sequence[bytes]) -> list[bytes | FieldError]:
        self.companies.append(len(bodies))
        if self.failure == "raises":
            raise RuntimeError("a bug")
        if self.failure == "forgets one":
            bodies = bodies[1:]
        return [InvalidJobError("is bad", "batch_size") if body == b"bad" else body for body in bodies]


def _ask(answers: Answers, bodies: Sequence[bytes], in_work: int) -> list[Any]:
    load = Load()
    load.in_work = in_work
    together = Together(answers.one, answers.many, load)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(together.answer(body) for body in bodies), return_exceptions=True)

    return asyncio.run(ask())


@pytest.mark.parametrize("failure", [None, "raises", "forgets one"])
def test_who_waits_at_the_same_time_is_answered_at_once(failure: str | None) -> None:
    answers = Answers(failure)
    bodies = [b"%d" % number for number in range(LEAST_TOGETHER)]
    found = _ask(answers, [*bodies, b"bad"], in_work=LEAST_TOGETHER + 1)
    assert found[:-1] == bodies
    assert isinstance(found[-1], InvalidJobError)
    # When answering them together fails, nobody goes without an answer.
    assert answers.companies == [LEAST_TOGETHER + 1, *([1] * (LEAST_TOGETHER + 1) if failure else [])]


@pytest.mark.parametrize("in_work", [2, 100])
def test_who_is_nearly_alone_is_answered_alone(in_work: int) -> None:
    answers = Answers()
    assert _ask(answers, [b"a", b"b"], in_work) == [b"a", b"b"]
    assert answers.companies == [1, 1]


def test_a_client_that_left_takes_nobody_with_it() -> None:
    answers, load = Answers(), Load()
    load.in_work = 100
    together = Together(answers.one, answers.many, load)

    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(together.answer(b"%d" % number)) for number in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(ask())
    assert isinstance(found[3], asyncio.CancelledError)
    assert [answer for number, answer in enumerate(found) if number != 3] == [
        b"%d" % number for number in range(10) if number != 3
    ]
