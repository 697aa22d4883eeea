"""The admission webhook as the API server sees it: reviews over TLS, patches applied, and nothing
refused when all else fails."""

import base64
import copy
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest

from gpumemnet.units import ceil_mib
from service.api.examples import EXAMPLE_JOBS
from tests.conftest import RunningService

ROOT = Path(__file__).parents[2]
WEBHOOK = ROOT / "integrations/kubernetes/webhook.py"
REVIEWS = Path(__file__).with_name("reviews")
JOB = "gpumemnet.io/job"
ID = "gpumemnet.io/prediction-id"
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed, and it makes the certificate"
)

Document = dict[str, Any]


def review(name: str, job: Any = EXAMPLE_JOBS["mlp"], **annotations: str) -> Document:
    """A review as the API server sent it, with the job in its annotation."""
    document: Document = json.loads((REVIEWS / f"{name}.json").read_text())
    if job is not None:
        annotations[JOB] = job if isinstance(job, str) else json.dumps(job)
    document["request"]["object"]["metadata"].setdefault("annotations", {}).update(annotations)
    return document


def patched(pod: Document, response: Document) -> Document:
    """The pod after the patch, by RFC 6902 for the one operation that the webhook uses."""
    assert response["patchType"] == "JSONPatch"
    pod = copy.deepcopy(pod)
    for step in json.loads(base64.b64decode(response["patch"])):
        assert step["op"] == "add"
        *path, last = [
            part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]
        ]
        target: Any = pod
        for part in path:
            target = target[int(part) if isinstance(target, list) else part]
        assert isinstance(target, dict)
        target[last] = step["value"]
    kubernetes_validate.validate(pod, "1.30", strict=True)
    return pod


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=webhook", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", "tls.key", "-out", "tls.crt"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        *subject,
        *files,
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@contextmanager
def running_webhook(certificate: Path, *arguments: str) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(WEBHOOK), "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--certificate",
        str(certificate / "tls.crt"),
        "--key",
        str(certificate / "tls.key"),
        *arguments,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    context = ssl.create_default_context(cafile=str(certificate / "tls.crt"))
    try:
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=context, timeout=300
        ) as client:
            deadline = time.monotonic() + 300
            while True:
                try:
                    assert client.get("/healthz").text == "ok"
                    break
                except httpx.TransportError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        _, log = process.communicate(timeout=300)
    assert "Traceback" not in log


Admit = Callable[[Document], Document]


def admitting(client: httpx.Client) -> Admit:
    def admit(document: Document) -> Document:
        answer = client.post("/mutate?timeout=1s", json=document)
        assert answer.status_code == 200
        content = answer.json()
        assert (content["apiVersion"], content["kind"]) == (
            "admission.k8s.io/v1",
            "AdmissionReview",
        )
        response: Document = content["response"]
        assert response["uid"] == document["request"]["uid"]
        assert response["allowed"] is True
        assert all(len(warning) <= 256 for warning in response.get("warnings", []))
        return response

    return admit


def fixture_of(mode: str, *arguments: str) -> Any:
    @pytest.fixture(scope="module")
    def admit(service: RunningService, certificate: Path) -> Iterator[Admit]:
        with running_webhook(
            certificate, "--mode", mode, "--url", service.url, *arguments
        ) as client:
            yield admitting(client)

    return admit


hami = fixture_of("hami")
volcano = fixture_of("volcano", "--volcano-memory-factor", "10")
kai = fixture_of("kai")


@pytest.fixture(scope="module")
def prediction(service: RunningService) -> Document:
    answer = httpx.post(f"{service.url}/v1/predict", json={"job": EXAMPLE_JOBS["mlp"]}, timeout=300)
    return dict(answer.json())


def test_hami_gets_the_limit_of_the_container_that_asks_for_a_gpu(
    hami: Admit, prediction: Document
) -> None:
    document = review("deployment")
    pod = patched(document["request"]["object"], hami(document))
    shipper, train = pod["spec"]["containers"]
    assert train["resources"]["limits"]["nvidia.com/gpumem"] == str(
        ceil_mib(prediction["safe_bytes"])
    )
    assert train["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert shipper["resources"] == {}
    assert re.fullmatch(UUID, pod["metadata"]["annotations"][ID])
    assert pod["metadata"]["annotations"]["gpumemnet.io/label-source"] == prediction["label_source"]
    assert pod["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"]


def test_volcano_gets_the_limit_in_its_plugins_units(volcano: Admit, prediction: Document) -> None:
    document = review("job")
    limits = patched(document["request"]["object"], volcano(document))["spec"]["containers"][0][
        "resources"
    ]["limits"]
    assert limits == {
        "volcano.sh/vgpu-number": "1",
        "volcano.sh/vgpu-memory": str(-(-ceil_mib(prediction["safe_bytes"]) // 10)),
    }


def test_kai_gets_the_request_of_the_pod(kai: Admit, prediction: Document) -> None:
    document = review("pod")
    pod = patched(document["request"]["object"], kai(document))
    assert pod["metadata"]["annotations"]["gpu-memory"] == str(
        ceil_mib(prediction["expected_bytes"])
    )
    assert pod["spec"] == document["request"]["object"]["spec"]


def test_a_model_and_how_it_is_trained_stand_beside_the_layer_list(
    hami: Admit, kai: Admit, service: RunningService
) -> None:
    options = {"method": "qlora", "sequence_length": 1024, "checkpointing": False}
    question = {"model": "Qwen/Qwen3-8B", "gpu": "RTX-4090", **options}
    answer = httpx.post(f"{service.url}/v1/fit", json=question, timeout=300).json()
    annotations: dict[str, str] = {
        f"gpumemnet.io/{name.replace('_', '-')}": str(value).lower()
        if name in options
        else str(value)
        for name, value in question.items()
    }
    document = review("deployment", job=None, **annotations)
    document["request"]["dryRun"] = True  # the service keeps nothing of such a question
    pod = patched(document["request"]["object"], hami(document))
    limits = pod["spec"]["containers"][1]["resources"]["limits"]
    assert limits["nvidia.com/gpumem"] == str(ceil_mib(answer["safe_bytes"]))
    assert pod["metadata"]["annotations"]["gpumemnet.io/label-source"] == "model_name"
    assert ID not in pod["metadata"]["annotations"]
    document["request"]["object"] = pod
    assert hami(document).keys() == {"uid", "allowed"}

    document = review("pod", job=None, **annotations)
    pod = patched(document["request"]["object"], kai(document))
    assert pod["metadata"]["annotations"]["gpu-memory"] == str(ceil_mib(answer["expected_bytes"]))

    for name, value in (("model", "no/model"), ("batch-size", "many"), ("lora-rang", "8")):
        changed = annotations | {f"gpumemnet.io/{name}": value}
        warning = left_alone(hami(review("deployment", job=None, **changed)))
        assert f"(422): {name.replace('-', '_')}: " in warning


def test_a_pod_is_patched_once(hami: Admit) -> None:
    document = review("deployment")
    document["request"]["object"] = patched(document["request"]["object"], hami(document))
    assert hami(document).keys() == {"uid", "allowed"}


def test_the_gpu_that_the_pod_names_is_asked_for(hami: Admit, prediction: Document) -> None:
    document = review("deployment", **{"gpumemnet.io/gpu": "H100"})
    limits = patched(document["request"]["object"], hami(document))["spec"]["containers"][1][
        "resources"
    ]["limits"]
    assert limits["nvidia.com/gpumem"] != str(ceil_mib(prediction["safe_bytes"]))


@pytest.mark.parametrize("resource", ["nvidia.com/gpumem", "nvidia.com/gpumem-percentage"])
def test_an_amount_by_hand_stays(hami: Admit, resource: str) -> None:
    document = review("deployment")
    document["request"]["object"]["spec"]["containers"][1]["resources"]["limits"][resource] = "50"
    assert hami(document).keys() == {"uid", "allowed"}


@pytest.mark.parametrize("annotation", ["gpu-memory", "gpu-fraction"])
def test_a_share_by_hand_stays(kai: Admit, annotation: str) -> None:
    assert kai(review("pod", **{annotation: "0.5"})).keys() == {"uid", "allowed"}


def test_of_two_gpu_containers_the_named_one_is_meant(hami: Admit) -> None:
    document = review("deployment")
    containers = document["request"]["object"]["spec"]["containers"]
    containers.append(copy.deepcopy(containers[1]) | {"name": "evaluate"})
    assert "name the one" in hami(document)["warnings"][0]
    document["request"]["object"]["metadata"]["annotations"]["gpumemnet.io/container"] = "evaluate"
    pod = patched(document["request"]["object"], hami(document))
    assert [
        "nvidia.com/gpumem" in container["resources"].get("limits", {})
        for container in pod["spec"]["containers"]
    ] == [
        False,
        False,
        True,
    ]


def left_alone(response: Document) -> str:
    """The one warning of a response without a patch."""
    assert response.keys() == {"uid", "allowed", "warnings"}
    [warning] = response["warnings"]
    return str(warning)


def test_pods_without_a_job_and_other_reviews_pass_in_silence(hami: Admit) -> None:
    assert hami(review("deployment", job=None)).keys() == {"uid", "allowed"}
    document = review("deployment")
    del document["request"]["object"]["metadata"]["annotations"]
    assert hami(document).keys() == {"uid", "allowed"}
    for changes in (
        {"operation": "UPDATE"},
        {"subResource": "ephemeralcontainers"},
        {"object": None},
        {"object": {"kind": "Job"}},
    ):
        document = review("deployment")
        document["request"].update(changes)
        assert hami(document).keys() == {"uid", "allowed"}


def test_pods_that_cannot_be_meant_are_left_with_a_warning(hami: Admit, kai: Admit) -> None:
    assert "asks for nvidia.com/gpu" in left_alone(hami(review("pod")))
    assert "KAI refuses" in left_alone(kai(review("deployment")))
    assert "not JSON" in left_alone(hami(review("deployment", job="{")))
    assert "not JSON" in left_alone(hami(review("deployment", job="[" * 100_000)))
    assert "(422)" in left_alone(hami(review("deployment", job={"family": "mlp"})))
    assert "(422)" in left_alone(hami(review("deployment", **{"gpumemnet.io/gpu": "no such GPU"})))
    dry = review("deployment")
    dry["request"]["dryRun"] = True
    assert "dry run" in left_alone(hami(dry))


def test_outside_the_support_nothing_is_set(hami: Admit, kai: Admit) -> None:
    job = {**EXAMPLE_JOBS["mlp"], "gradient_accumulation": 64}
    assert "no safe amount" in left_alone(hami(review("deployment", job=job)))
    assert "no safe amount" in left_alone(kai(review("pod", job=job)))


def test_a_body_that_is_no_review_is_a_400(service: RunningService, certificate: Path) -> None:
    with running_webhook(certificate, "--mode", "hami", "--url", service.url) as client:
        for body in (b"", b"{", b"[]", b"{}", b'{"request": {"uid": 1}}', b"[" * 100_000, b"\xff"):
            assert client.post("/mutate", content=body).status_code == 400
        assert client.post("/mutate", content=b" " * (5 * 2**20)).status_code == 413
        assert client.get("/mutate").status_code == 405


FAILURES = {
    "hang": "0.5 s",
    "401": "(401)",
    "500": "URL",
    "html": "URL",
    "other": "URL",
    "deep": "URL",
    "list": "URL",
}


def test_a_service_that_fails_refuses_no_pod(
    canned: str, choose: Callable[[str], None], certificate: Path
) -> None:
    with running_webhook(certificate, "--mode", "hami", "--url", f"{canned}/chosen") as client:
        admit = admitting(client)
        for kind, said in FAILURES.items():
            choose(kind)
            assert said in left_alone(admit(review("deployment")))


def test_a_service_that_is_down_refuses_no_pod(certificate: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    with running_webhook(
        certificate, "--mode", "kai", "--url", "http://127.0.0.1:1/", "--api-key-file", str(key)
    ) as client:
        admit = admitting(client)
        assert "cannot be asked" in left_alone(admit(review("pod")))
        key.write_text("a key at last\n")
        assert "cannot be asked" in left_alone(admit(review("pod")))
        key.write_bytes(b"\xff\n\x00")
        assert left_alone(admit(review("pod")))
