"""Answers questions that came in together in one go.

A model takes little longer for twenty jobs than for three, so what waits on a busy service is answered by the handful: nobody is
made to wait for company, and a question that is alone is answered by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gpumemnet.errors import FieldError

from ..middleware.limits import LEAST_TOGETHER
from ..middleware.load import LOAD, Load

logger = logging.getLogger("gpumemnet.service")

Answer = bytes | FieldError


class Together:
    """Collects the questions that one round of the event loop brings.

    Args:
        answer_one: answers a question; raises a :class:`~gpumemnet.errors.FieldError` where it is at fault.
        answer_many: answers each of several; gives that error in the place of the answer.
        load: how many requests are in work; that of this process unless given.
    """

    def __init__(
        self, answer_one: Callable[[bytes], bytes], answer_many: Callable[[Sequence[bytes]], Sequence[Answer]], load: Load = LOAD
    ) -> None:
        self._answer_one = answer_one
        self._answer_many = answer_many
        self._load = load
        self._waiting: list[tuple[bytes, asyncio.Future[bytes]]] = []

    async def answer(self, body: bytes) -> bytes:
        """The answer to one question.

        Raises:
            FieldError: when something in it is at fault.
        """
        if self._load.in_work < LEAST_TOGETHER:
            return self._answer_one(body)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting.append((body, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._answer_waiting)
        return await future

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        waiting = [(body, future) for body, future in waiting if not future.done()]  # cancelled: the client has left
        for (_, future), answer in zip(waiting, self._answers([body for body, _ in waiting]), strict=True):
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _answers(self, bodies: Sequence[bytes]) -> Sequence[bytes | Exception]:
        if len(bodies) >= LEAST_TOGETHER:
            try:
                answers = self._answer_many(bodies)
                if len(answers) == len(bodies):
                    return answers
                logger.error("answering %d questions together gave %d answers", len(bodies), len(answers))
            except Exception as error:  # one question must not take the others with it
                logger.error("answering together failed: %s", type(error).__name__, exc_info=error)
        return [self._one(body) for body in bodies]

    def _one(self, body: bytes) -> bytes | Exception:
        try:
            return self._answer_one(body)
        except Exception as error:
            return error
