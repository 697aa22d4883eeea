"""Microbatching: concurrent requests are predicted by one call.

A model takes little longer for twenty jobs than for one.  Requests that arrive in one iteration of the event loop are predicted
together at the beginning of the next.  A lone request is never delayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")

logger = logging.getLogger("gpumemnet.service")


class Microbatch(Generic[Q, A]):
    """Collects questions until the next iteration of the event loop.

    Args:
        answer: takes several questions; returns a prediction or an exception for each.
    """

    def __init__(self, answer: Callable[[Sequence[Q]], Sequence[A | Exception]]) -> None:
        self._answer = answer
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []

    async def ask(self, question: Q) -> A:
        """The prediction for one question.

        Raises:
            Exception: the exception that ``answer`` returned for it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[A] = loop.create_future()
        self._waiting.append((question, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._answer_waiting)
        return await future

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        waiting = [(question, future) for question, future in waiting if not future.done()]  # cancelled: client disconnected
        answers = self._answers([question for question, _ in waiting]) if waiting else []
        for (_, future), answer in zip(waiting, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _answers(self, questions: Sequence[Q]) -> Sequence[Any]:
        try:
            return self._answer(questions)
        except Exception as error:
            if len(questions) == 1:
                return [error]
            logger.exception("answering %d questions together failed: each is answered alone", len(questions))
            return [self._answers([question])[0] for question in questions]  # one failure must not fail the others
