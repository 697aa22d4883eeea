"""Requests that wait at the same time are answered by one call, and each gets the answer that it
would get alone."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gpumemnet.errors import InvalidJobError
from service.api.microbatching import Microbatch


class Answers:
    """Answers a question with itself and notes how many were asked together."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.sizes: list[int] = []

    def __call__(self, questions: Sequence[str]) -> list[str | Exception]:
        self.sizes.append(len(questions))
        if self.failure in questions:
            raise RuntimeError("a bug")
        return [
            InvalidJobError("is bad", "batch_size") if question == "bad" else question
            for question in questions
        ]


def ask(answers: Answers, questions: Sequence[str]) -> list[Any]:
    microbatch = Microbatch(answers)

    async def ask_all() -> list[Any]:
        return await asyncio.gather(
            *(microbatch.predict(question) for question in questions), return_exceptions=True
        )

    return asyncio.run(ask_all())


def test_what_waits_at_the_same_time_is_answered_by_one_call() -> None:
    answers = Answers()
    found = ask(answers, ["a", "bad", "b"])
    assert (found[0], found[2]) == ("a", "b")
    assert isinstance(found[1], InvalidJobError)
    assert answers.sizes == [3]


def test_one_question_that_cannot_be_answered_takes_no_other_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = Answers(failure="b")
    found = ask(answers, ["a", "b", "c"])
    assert (found[0], found[2]) == ("a", "c")
    assert isinstance(found[1], RuntimeError)
    assert answers.sizes == [3, 1, 1, 1]
    assert "predicted alone" in caplog.text


def test_a_lone_question_is_answered_in_the_next_round_of_the_event_loop() -> None:
    async def rounds() -> int:
        task = asyncio.ensure_future(Microbatch(Answers()).predict("a"))
        count = 0
        while not task.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert asyncio.run(rounds()) <= 3


def test_a_client_that_left_takes_no_other_with_it() -> None:
    answers = Answers()
    microbatch = Microbatch(answers)

    async def ask_all() -> list[Any]:
        tasks = [asyncio.create_task(microbatch.predict(str(number))) for number in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(ask_all())
    assert isinstance(found[3], asyncio.CancelledError)
    assert [answer for number, answer in enumerate(found) if number != 3] == [
        str(number) for number in range(10) if number != 3
    ]
    assert answers.sizes == [9]
