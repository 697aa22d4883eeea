"""The clients against a real service, and against servers that are none."""

import asyncio
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.message import Message
from typing import cast

import pytest

from gpumemnet.client import Client, Device, ServedPrediction
from gpumemnet.errors import InvalidRequestError, ServiceError
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.predict.gpu_fit import fits, target
from gpumemnet.predict.largest_batch import batch_sizes
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import GIB, MIB
from tests.conftest import RunningService, StartService
from tests.registries import other_bundle

PATIENT_SECONDS = 300.0
STORED = b'{"id": 1}'
"""The answer to an observation that was stored."""
DEVICES: list[Device] = [{"id": "GPU-1", "gpu": "T4", "free_mib": 1}]


@pytest.fixture(scope="module")
def mlp_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bundle of one family, so that there are families without a model."""
    folder = tmp_path_factory.mktemp("bundles") / "mlp"
    return other_bundle(folder, "1", families=["mlp"]).source


@pytest.fixture(scope="module")
def predictor(mlp_only: str) -> Predictor:
    return Predictor.load(mlp_only)


@pytest.fixture(scope="module")
def service(start_service: StartService, mlp_only: str) -> Iterator[RunningService]:
    with start_service("--bundle", mlp_only) as running:
        yield running


@pytest.fixture
def job(predictor: Predictor) -> TrainingJob:
    layers = (Layer("linear", 256, 65_792), Layer("relu", 256), Layer("linear", 10, 2570))
    family = predictor.bundles[0].card.families[0]
    return TrainingJob(
        family=family,
        batch_size=64,
        input_elements=256,
        optimizer="adam",
        precision="fp32",
        activation_function="relu",
        layers=layers,
    )


@pytest.fixture
def unsupported(predictor: Predictor, job: TrainingJob) -> TrainingJob:
    """A job of a family that no loaded model answers for."""
    missing = set(FAMILIES).difference(families_of(predictor))
    return replace(job, family=missing.pop())


@pytest.fixture
def client(service: RunningService) -> Iterator[Client]:
    with Client(service.url, timeout_seconds=PATIENT_SECONDS) as client:
        yield client


def families_of(predictor: Predictor) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(family for bundle in predictor.bundles for family in bundle.card.families)
    )


def assert_same(estimate: Prediction | ServiceError, expected: Prediction) -> None:
    assert isinstance(estimate, Prediction)
    for name in Prediction.__slots__:
        if name != "probabilities":
            assert getattr(estimate, name) == getattr(expected, name), name
    assert estimate.probabilities == pytest.approx(expected.probabilities, abs=1e-15)
    assert estimate.bin_index == expected.bin_index


@pytest.mark.parametrize(
    "bins",
    [None, bins_of_width(GIB), bins_of_width(100 * MIB), *PUBLISHED_BINS.values()],
    ids=lambda bins: bins.name if bins else "own",
)
def test_the_service_answers_as_the_predictor_does(
    client: Client, predictor: Predictor, job: TrainingJob, bins: BinScheme | None
) -> None:
    assert_same(
        client.predict(job, bins=bins, coverage=0.9),
        predictor.predict(job, bins=bins, coverage=0.9),
    )


def test_another_gpu_and_what_the_job_fits(
    client: Client, predictor: Predictor, job: TrainingJob
) -> None:
    prediction = client.predict(
        job, gpu="H100", encoder="mlp", fits=["A100/3g.20gb"], devices=DEVICES
    )
    assert_same(prediction, predictor.predict(job, gpu="H100"))
    targets = [target("A100/3g.20gb"), target("T4", free_mib=1, device="GPU-1")]
    assert prediction.fits == fits(predictor, job, targets)
    assert client.predict(job, fits=True).fits == fits(predictor, job)
    many = client.predict_many([job, job], fits=("T4",))
    assert [found.fits for found in many if isinstance(found, ServedPrediction)] == [
        fits(predictor, job, [target("T4")])
    ] * 2


def test_the_inverse_questions(client: Client, predictor: Predictor, job: TrainingJob) -> None:
    expected = batch_sizes(predictor, job, target("A100/1g.5gb"), max_batch=500, coverage=0.9)
    assert client.batch_sizes(job, gpu="A100/1g.5gb", max_batch=500, coverage=0.9) == expected
    free = client.batch_sizes(job, gpu="A100", free_mib=2000)
    assert free == batch_sizes(predictor, job, target("A100", free_mib=2000))


def test_a_job_of_which_nothing_is_known_has_no_safe_bytes(
    client: Client, predictor: Predictor, job: TrainingJob
) -> None:
    huge = replace(job, gradient_accumulation=64)
    estimate = client.predict(huge)
    assert estimate.safe_bytes is None
    assert_same(estimate, predictor.predict(huge))


def test_threads_share_a_client(client: Client, predictor: Predictor, job: TrainingJob) -> None:
    async def ask() -> None:
        asked = (asyncio.to_thread(client.predict, job) for _ in range(20))
        for estimate in await asyncio.gather(*asked):
            assert_same(estimate, predictor.predict(job))

    asyncio.run(ask())


def test_many_jobs_are_answered_in_order_and_one_alone_may_fail(
    client: Client, predictor: Predictor, job: TrainingJob, unsupported: TrainingJob
) -> None:
    first, second, third = client.predict_many([job, unsupported, job], bins=PUBLISHED_BINS[2000])
    expected = predictor.predict_many([job, job], bins=PUBLISHED_BINS[2000])
    assert_same(first, expected[0])
    assert_same(third, expected[1])
    assert isinstance(second, ServiceError)
    assert second.status == 422
    assert "jobs[1].family" in str(second)
    assert client.predict_many([]) == []


def test_a_refusal_carries_the_problem(client: Client, unsupported: TrainingJob) -> None:
    with pytest.raises(ServiceError, match=r"refused: job\.family: no model for") as raised:
        client.predict(unsupported)
    assert raised.value.status == 422
    errors = cast("list[dict[str, str]]", raised.value.problem["errors"])
    assert errors[0]["field"] == "job.family"


def test_the_address_comes_from_the_environment(
    service: RunningService, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEMNET_URL", service.url + "/")
    with Client(timeout_seconds=PATIENT_SECONDS) as client:
        assert client.predict(job).expected_bytes > 0


def test_without_an_address_it_is_the_one_of_make_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUMEMNET_URL", raising=False)
    with Client() as client:
        assert (client.url, client.timeout_seconds) == ("http://127.0.0.1:8000", 0.5)


def test_a_service_that_does_not_run(job: TrainingJob) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        Client(f"http://127.0.0.1:{port}") as client,
        pytest.raises(ServiceError, match="cannot be reached") as raised,
    ):
        client.predict(job)
    assert raised.value.status is None
    assert raised.value.problem == {}


def test_a_service_that_does_not_answer_in_time(job: TrainingJob) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.05) as client,
        pytest.raises(ServiceError, match=r"did not answer within 0\.05 s"),
    ):
        client.predict(job)


@pytest.mark.parametrize(
    "url", ["not a url", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1:99999"]
)
def test_an_address_that_is_none(job: TrainingJob, url: str) -> None:
    with Client(url) as client, pytest.raises(ServiceError, match="cannot be reached"):
        client.predict(job)


@dataclass(frozen=True)
class SentRequest:
    path: str
    headers: Message
    body: bytes


@contextmanager
def canned_server(status: int, content: bytes) -> Iterator[tuple[str, list[SentRequest]]]:
    """An HTTP server that gives one answer to everything, and keeps what it is sent."""
    sent: list[SentRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent.append(SentRequest(self.path, self.headers, body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 201])
def test_an_observation_is_sent_as_the_service_reads_it(job: TrainingJob, status: int) -> None:
    ended = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    with (
        canned_server(status, STORED) as (url, sent),
        Client(url, timeout_seconds=PATIENT_SECONDS, api_key="k") as client,
    ):
        answer = client.observe(
            prediction_id="01910c5e",
            peak_bytes=2000 * 2**20,
            source="nvml_process",
            idempotency_key="job 7",
        )
        assert answer == {"id": 1}
        client.observe(
            job=job,
            gpu="A100",
            source="slurm_gpumem",
            oom=True,
            limit_bytes=4096 * 2**20,
            observed_at=ended,
        )
    assert [request.path for request in sent] == ["/v1/observations"] * 2
    assert sent[0].headers["Authorization"] == "Bearer k"
    by_prediction, by_job = (json.loads(request.body) for request in sent)
    observed = {"peak_bytes": 2000 * 2**20, "source": "nvml_process", "idempotency_key": "job 7"}
    assert by_prediction == {"prediction_id": "01910c5e", **observed}
    assert job_from_dict(by_job.pop("job")) == job
    rest = {
        "gpu": "A100",
        "source": "slurm_gpumem",
        "oom": True,
        "limit_bytes": 4096 * 2**20,
        "observed_at": ended.isoformat(),
    }
    assert by_job == rest


def test_the_key_comes_from_the_environment(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEMNET_API_KEY", "from-the-environment")
    with canned_server(201, STORED) as (url, sent):
        with Client(url, timeout_seconds=PATIENT_SECONDS) as client:
            client.observe(prediction_id="x")
        with Client(url, timeout_seconds=PATIENT_SECONDS, api_key="") as client:
            client.observe(prediction_id="x")
        with Client(url, timeout_seconds=PATIENT_SECONDS, api_key="given") as client:
            client.observe(prediction_id="x")
    keys = [request.headers["Authorization"] for request in sent]
    assert keys == ["Bearer from-the-environment", None, "Bearer given"]


@pytest.mark.parametrize("key", ["a b", "a\nb", "ä"])
def test_a_key_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="api_key: must be printable ASCII") as raised:
        Client(api_key=key)
    assert key not in str(raised.value)


@pytest.mark.parametrize("status", [200, 201, 302, 404, 502])
@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"detail": 3, "bins": 1}',
        b'{"results": []}',
        b"\xff",
    ],
)
def test_a_server_that_is_no_service(job: TrainingJob, status: int, content: bytes) -> None:
    with (
        canned_server(status, content) as (url, _),
        Client(url, timeout_seconds=PATIENT_SECONDS) as client,
    ):
        questions: list[Callable[[], object]] = [
            lambda: client.predict(job),
            lambda: client.predict_many([job]),
            lambda: client.batch_sizes(job),
        ]
        for ask in questions:
            with pytest.raises(ServiceError) as raised:
                ask()
            assert raised.value.status == status


def test_without_httpx_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['httpx'] = None\n"
        "from gpumemnet.client import Client\n"
        "from gpumemnet.errors import MissingExtraError\n"
        "try: Client()\n"
        "except MissingExtraError as error: print(error)\n"
        "assert not {'onnxruntime', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert "pip install -e '.[client]'" in done.stdout, done.stderr
