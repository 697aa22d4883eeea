"""Searches over many batch sizes: they wait for each other, and too many are refused at once."""

import asyncio
import threading
from typing import Any

import orjson
import pytest

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.prediction import PredictionTable
from gpumemnet.predict.predictor import Predictor
from service.api.predictions import PredictionApi, Search
from service.api.problems import Refusal
from service.searches import SearchQueue


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
            asyncio.create_task(queue.answer(search(name, layers)))
            for name, layers in (("first", 6), ("second", 4))
        )
        while not running:
            await asyncio.sleep(0.01)
        with pytest.raises(Refusal) as refused:
            await queue.answer(search("third", 1))
        assert refused.value.kind.status == 503
        assert int((refused.value.headers or {})["Retry-After"]) >= 1
        assert running == ["first"]
        release.set()
        assert [await first, await second] == [
            b'{"name":"first","together":1}',
            b'{"name":"second","together":2}',
        ]
        return await queue.answer(search("alone", 100))  # however large, one alone is answered

    assert b"alone" in asyncio.run(ask())


@pytest.mark.parametrize(("repeats", "largest"), [(1, 1), (1, 2**20), (1000, 1024)])
def test_the_price_of_a_search_is_what_it_computes(
    job: dict[str, Any], repeats: int, largest: int
) -> None:
    """A search that is charged too little lets others wait behind it; one that is charged too much
    is refused for nothing."""
    counting = Counting(Predictor.default().bundles)
    api = PredictionApi(counting, 10)
    batches = api.batch_sizes_search(
        orjson.dumps({"job": {**job, "layers": job["layers"] * repeats}, "max_batch": largest})
    )
    gpus = api.smallest_gpu_search(
        orjson.dumps({"job": {**job, "layers": job["layers"] * repeats, "batch_size": largest}})
    )
    for search in (batches, gpus):
        counting.layers = 0
        search.answer()
        assert 0.05 * search.layers <= counting.layers <= search.layers


class Counting(Predictor):
    """Counts the layers that it predicts for."""

    layers = 0

    def predict_table(self, jobs: JobTable, *arguments: Any, **options: Any) -> PredictionTable:
        self.layers += max(len(jobs), int(jobs.layer_counts.sum()))
        return super().predict_table(jobs, *arguments, **options)
