"""Searches over many batch sizes: they wait for each other, and too many are refused at once."""

import asyncio
import threading
from typing import Any

import orjson
import pytest

from gpumemnet.predict.predictor import Predictor
from service.api.endpoint import SearchQueue
from service.api.predictions import PredictionApi, Search
from service.api.problems import Refusal


def test_searches_wait_for_each_other_and_too_many_are_refused() -> None:
    release = threading.Event()
    running: list[str] = []

    def search(name: str, layers: int) -> Search:
        return Search(layers, lambda: answer(name))

    def answer(name: str) -> dict[str, Any]:
        running.append(name)
        assert release.wait(60)
        return {"name": name, "together": len(running)}

    async def ask() -> bytes:
        queue = SearchQueue(max_layers=10)
        first, second = (
            asyncio.create_task(queue.answer(search(name, layers))) for name, layers in (("first", 6), ("second", 4))
        )
        while not running:
            await asyncio.sleep(0.01)
        with pytest.raises(Refusal) as refused:
            await queue.answer(search("third", 1))
        assert refused.value.kind.status == 503
        assert int((refused.value.headers or {})["Retry-After"]) >= 1
        assert running == ["first"]
        release.set()
        assert [await first, await second] == [b'{"name":"first","together":1}', b'{"name":"second","together":2}']
        return await queue.answer(search("alone", 100))  # however large, one alone is answered

    assert b"alone" in asyncio.run(ask())


def test_the_price_of_a_search_is_layers_times_points(predictor: Predictor, job: dict[str, Any]) -> None:
    api = PredictionApi(predictor, 10)
    few, many = (
        api.batch_sizes_search(orjson.dumps({"job": {**job, "layers": job["layers"] * factor}, "max_batch": largest})).layers
        for factor, largest in ((1, 1024), (10, 2**20))
    )
    assert 10 * few < many
