"""Collects requests that arrive together, so that one call of the model answers them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")

logger = logging.getLogger("gpumemnet.service")


class Microbatch(Generic[Request, Result]):
    """Microbatching: requests that arrive in one iteration of the event loop are predicted together
    at the next.

    A model takes little longer for twenty jobs than for one.  A lone request is never delayed.

    Args:
        predict: takes several requests; returns a prediction or an exception for each.
    """

    def __init__(
        self, predict: Callable[[Sequence[Request]], Sequence[Result | Exception]]
    ) -> None:
        self._predict = predict
        self._waiting: list[tuple[Request, asyncio.Future[Result]]] = []

    async def predict(self, request: Request) -> Result:
        """The prediction for one request.

        Raises:
            Exception: the exception that ``predict`` returned for it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((request, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._predict_waiting)
        return await future

    def _predict_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        waiting = [
            (request, future) for request, future in waiting if not future.done()
        ]  # cancelled: client disconnected
        results = self._results([request for request, _ in waiting]) if waiting else []
        for (_, future), result in zip(waiting, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _results(self, requests: Sequence[Request]) -> Sequence[Any]:
        try:
            return self._predict(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            logger.exception(
                "%d requests could not be predicted together: each is predicted alone",
                len(requests),
            )
            return [
                self._results([request])[0] for request in requests
            ]  # one failure must not fail the others
