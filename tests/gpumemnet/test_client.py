"""The clients against a real service, and against servers that are none."""

import asyncio
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumemnet.bins import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.client import AsyncClient, Client
from gpumemnet.errors import InvalidRequestError, ServiceError
from gpumemnet.estimate import Estimate
from gpumemnet.job import FAMILIES, TrainingJob
from gpumemnet.layers import Layer
from gpumemnet.predictor import Predictor
from gpumemnet.units import GIB, MIB

PATIENT_SECONDS = 30.0
MLP_ONLY = Path(__file__).parents[2] / "gpumemnet" / "bundles" / "mlp-a100-published"
"""Served alone, so that there are families without a model."""


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.load(MLP_ONLY)


@pytest.fixture(scope="module")
def service(start_service):
    with start_service("--bundle", str(MLP_ONLY)) as running:
        yield running


@pytest.fixture
def job(predictor) -> TrainingJob:
    layers = (Layer("linear", 256, 65_792), Layer("relu", 256), Layer("linear", 10, 2570))
    family = predictor.bundles[0].card.family
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
def unsupported(predictor, job) -> TrainingJob:
    """A job of a family that no loaded model answers for."""
    missing = set(FAMILIES) - {bundle.card.family for bundle in predictor.bundles}
    return TrainingJob(
        family=missing.pop(), batch_size=1, input_elements=1, optimizer="adam", precision="fp32", layers=job.layers
    )


@pytest.fixture
def client(service) -> Iterator[Client]:
    with Client(service.url, timeout_seconds=PATIENT_SECONDS) as client:
        yield client


def assert_same(estimate: Estimate, expected: Estimate) -> None:
    for name in Estimate.__slots__:
        if name != "probabilities":
            assert getattr(estimate, name) == getattr(expected, name), name
    assert estimate.probabilities == pytest.approx(expected.probabilities, abs=1e-15)
    assert estimate.bin_bounds_bytes == expected.bin_bounds_bytes


@pytest.mark.parametrize(
    "bins",
    [None, bins_of_width(GIB), bins_of_width(100 * MIB), *PUBLISHED_BINS.values()],
    ids=lambda bins: bins.name if bins else "own",
)
def test_the_service_answers_as_the_predictor_does(client, predictor, job, bins):
    assert_same(client.predict(job, bins=bins, coverage=0.9), predictor.predict(job, bins=bins, coverage=0.9))


def test_a_job_outside_the_support_has_no_safe_bytes(client, predictor, job):
    huge = TrainingJob(
        family=job.family, batch_size=2**31 - 1, input_elements=256, optimizer="adam", precision="fp32", layers=job.layers
    )
    estimate = client.predict(huge)
    assert estimate.safe_bytes is None
    assert_same(estimate, predictor.predict(huge))


def test_the_asynchronous_client_answers_the_same(service, predictor, job):
    async def ask():
        async with AsyncClient(service.url, timeout_seconds=PATIENT_SECONDS) as client:
            estimates = await asyncio.gather(*(client.predict(job) for _ in range(20)))
            return estimates, await client.predict_many([job]), await client.models(), await client.health()

    estimates, batch, models, families = asyncio.run(ask())
    for estimate in (*estimates, *batch):
        assert_same(estimate, predictor.predict(job))
    assert [model["sha256"] for model in models] == [bundle.sha256 for bundle in predictor.bundles]
    assert families == tuple(dict.fromkeys(bundle.card.family for bundle in predictor.bundles))


def test_many_jobs_are_answered_in_order_and_one_alone_may_fail(client, predictor, job, unsupported):
    first, second, third = client.predict_many([job, unsupported, job], bins=PUBLISHED_BINS["published-2000mib"])
    expected = predictor.estimate([job, job], bins=PUBLISHED_BINS["published-2000mib"])
    assert_same(first, expected[0])
    assert_same(third, expected[1])
    assert isinstance(second, ServiceError)
    assert second.status == 422
    assert "jobs[1].family" in str(second)
    assert client.predict_many([]) == []


def test_models_and_health(client, predictor):
    assert [model["card"] for model in client.models()] == [bundle.card.document for bundle in predictor.bundles]
    assert client.health() == tuple(dict.fromkeys(bundle.card.family for bundle in predictor.bundles))


def test_a_refusal_carries_the_problem(client, unsupported):
    with pytest.raises(ServiceError, match=r"refused: job\.family: no model for") as raised:
        client.predict(unsupported)
    assert raised.value.status == 422
    assert raised.value.problem["errors"][0]["field"] == "job.family"


def test_a_coverage_that_nobody_calibrated_is_refused(client, job):
    with pytest.raises(ServiceError, match="refused: coverage: must be"):
        client.predict(job, coverage=0.01)


@pytest.mark.parametrize("bins", [BinScheme(GIB, 7), BinScheme(100 * MIB + 1, 10), bins_of_width(100 * MIB + 1)])
def test_bins_that_the_service_does_not_know_are_refused_before_asking(client, job, bins):
    with pytest.raises(InvalidRequestError, match="bins"):
        client.predict(job, bins=bins)


def test_the_address_comes_from_the_environment(service, job, monkeypatch):
    monkeypatch.setenv("GPUMEMNET_URL", service.url + "/")
    with Client(timeout_seconds=PATIENT_SECONDS) as client:
        assert client.predict(job).expected_bytes > 0


def test_without_an_address_it_is_the_one_of_make_serve(monkeypatch):
    monkeypatch.delenv("GPUMEMNET_URL", raising=False)
    with Client() as client:
        assert (client.url, client.timeout_seconds) == ("http://127.0.0.1:8000", 0.5)


def test_a_service_that_does_not_run(job):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(ServiceError, match="cannot be reached") as raised:
        client.predict(job)
    assert raised.value.status is None
    assert raised.value.problem == {}


def test_a_service_that_does_not_answer_in_time(job):
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.05) as client,
        pytest.raises(ServiceError, match=r"did not answer within 0\.05 s"),
    ):
        client.predict(job)


@pytest.mark.parametrize("url", ["not a url", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1:99999"])
def test_an_address_that_is_none(job, url):
    with Client(url) as client, pytest.raises(ServiceError, match="cannot be reached"):
        client.predict(job)


@contextmanager
def foreign_server(status: int, content: bytes) -> Iterator[str]:
    """An HTTP server that is no service of ours."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
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
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 201, 302, 404, 502])
@pytest.mark.parametrize(
    "content", [b"<html>", b"", b"[]", b"null", b"{}", b'{"detail": 3, "bins": 1}', b'{"results": []}', b"\xff"]
)
def test_a_server_that_is_no_service(job, status, content):
    with foreign_server(status, content) as url, Client(url, timeout_seconds=PATIENT_SECONDS) as client:
        for ask in (client.predict, lambda job: client.predict_many([job])):
            with pytest.raises(ServiceError) as raised:
                ask(job)
            assert raised.value.status == status


def test_without_httpx_the_extra_is_named():
    script = (
        "import sys; sys.modules['httpx'] = None\n"
        "from gpumemnet.client import Client\n"
        "from gpumemnet.errors import MissingExtraError\n"
        "try: Client()\n"
        "except MissingExtraError as error: print(error)\n"
        "assert not {'onnxruntime', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "pip install 'gpumemnet[client]'" in done.stdout, done.stderr
