"""Ids are UUIDs of version 7, also where many are made at once, by threads or by forked workers."""

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from service.api.prediction_id import prediction_id


@given(st.integers(0, 2**48 * 10**6 - 1))
def test_an_id_is_a_uuid_that_tells_its_time(now_nanoseconds: int) -> None:
    text = prediction_id(now_nanoseconds)
    identity = uuid.UUID(text)
    assert str(identity) == text
    assert (identity.version, identity.variant) == (7, uuid.RFC_4122)
    assert identity.int >> 80 == now_nanoseconds // 10**6


def test_no_id_comes_twice_from_threads() -> None:
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda _: prediction_id(0), range(20_000)))
    assert len(set(ids)) == len(ids)


def test_forked_workers_make_ids_of_their_own() -> None:
    prediction_id(0)  # there is a block to be shared
    made = []
    for _ in range(3):
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(writing, "".join(prediction_id(0) for _ in range(5)).encode())
            os._exit(0)
        os.waitpid(worker, 0)
        text = os.read(reading, 1000).decode()
        made += [text[at : at + 36] for at in range(0, len(text), 36)]
        os.close(reading)
        os.close(writing)
    assert len(set(made)) == len(made) == 15
    assert prediction_id(time.time_ns()) not in made
