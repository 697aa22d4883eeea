"""A mutating admission webhook that writes what gpumemnet predicts for a pod's training job into
the field of the GPU scheduler.

A pod names its job in the annotation ``gpumemnet.io/job`` (JSON), or the model that it fine-tunes in
``gpumemnet.io/model``, and how in further ones.  The webhook asks the service, and answers the API
server with a patch for HAMi, Volcano or KAI.  It fails open: every pod is allowed, and where nothing
is known it is left as it was, with a warning that ``kubectl`` shows.
README.md beside this file says how to install it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

JOB: Final = "gpumemnet.io/job"
MODEL: Final = "gpumemnet.io/model"
GPU: Final = "gpumemnet.io/gpu"
CONTAINER: Final = "gpumemnet.io/container"
PREDICTION_ID: Final = "gpumemnet.io/prediction-id"
LABEL_SOURCE: Final = "gpumemnet.io/label-source"
PREFIX: Final = "gpumemnet.io/"
NO_OPTIONS: Final = (JOB, MODEL, GPU, CONTAINER, PREDICTION_ID, LABEL_SOURCE)
BY_NAME: Final = "model_name"
"""Label source of an amount that was asked for by a model's name."""

MAX_REVIEW_BYTES: Final = 4 * 1024 * 1024
"""More than the API server takes for an object (3 MiB)."""
MAX_WARNING_CHARACTERS: Final = 256
"""The API server cuts longer warnings."""
MAX_DIGITS: Final = 20
"""Most digits of a number in an annotation; the service refuses smaller ones."""
CERTIFICATE_LOOK_SECONDS: Final = 30.0

logger = logging.getLogger("gpumemnet.webhook")

Document = dict[str, Any]


class Skip(Exception):
    """The pod stays as it is; the text, unless empty, is the warning that says why."""


@dataclass(frozen=True)
class Field:
    """Where a GPU-sharing system reads how much memory of each GPU a container takes.

    Attributes:
        asks: resource by which a container asks for GPUs.
        memory: resource that takes the amount, by GPU, in units of ``mib_per_unit``.
        others: resources that say the same in another way; one of them present, the container is
            left alone.
    """

    asks: str
    memory: str
    others: tuple[str, ...]


FIELDS: Final = {
    "hami": Field("nvidia.com/gpu", "nvidia.com/gpumem", ("nvidia.com/gpumem-percentage",)),
    "volcano": Field(
        "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", ("volcano.sh/vgpu-memory-percentage",)
    ),
}
MODES: Final = (*FIELDS, "kai")
KAI_MEMORY: Final = "gpu-memory"
KAI_FRACTION: Final = "gpu-fraction"
WHOLE_GPU: Final = "nvidia.com/gpu"


@dataclass(frozen=True)
class Settings:
    """What the site chose.

    Attributes:
        mode: one of :data:`MODES`.
        url: address of the prediction service.
        key_file: file with an API key of scope ``predict``; read for every question, so that it can
            be changed.
        gpu: GPU to ask for where the pod's annotation names none; the service's when empty.
        volcano_memory_factor: MiB in one unit of ``volcano.sh/vgpu-memory``, as its device plugin
            was started with.
        timeout_seconds: for the whole question; shorter than the webhook's ``timeoutSeconds``.
    """

    mode: str
    url: str
    key_file: Path | None = None
    gpu: str = ""
    volcano_memory_factor: int = 1
    timeout_seconds: float = 0.5


def question_of(annotations: Document, gpu: str) -> tuple[str, bytes]:
    """The operation to ask and the body to send: the job where there is one, else the model.

    Raises:
        Skip: the job is not JSON.
    """
    question: Document = {"gpu": gpu} if gpu else {}
    try:
        if JOB in annotations:
            question["job"] = json.loads(annotations[JOB])
            return "predict", json.dumps(question, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise Skip(f"the annotation {JOB} is not JSON, which has no NaN and no Infinity") from None
    question["model"] = annotations[MODEL]
    for name, text in annotations.items():
        if name.startswith(PREFIX) and name not in NO_OPTIONS:
            # The service knows the options and their values, and refuses others.
            option = name.removeprefix(PREFIX).replace("-", "_")
            question[option] = {"true": True, "false": False}.get(text, text)
            if text.isdecimal():
                question[option] = int(text[:MAX_DIGITS])
    return "fit", json.dumps(question).encode()


async def ask(
    client: httpx.AsyncClient, settings: Settings, operation: str, content: bytes
) -> Document:
    """The service's answer to the question ``content``.

    Raises:
        Skip: when it does not come in time, or is none.
    """
    try:
        headers = {"Content-Type": "application/json"}
        if settings.key_file:
            headers["Authorization"] = f"Bearer {settings.key_file.read_text().strip()}"
        async with asyncio.timeout(settings.timeout_seconds):
            response = await client.post(
                f"{settings.url}/v1/{operation}", content=content, headers=headers
            )
        answer = response.json()
        if response.status_code != 200:
            raise Skip(f"the service refused ({response.status_code}): {answer['detail']}")
        if operation == "fit":
            amounts = {name: answer[name] for name in ("expected_bytes", "safe_bytes")}
            return {"prediction_id": "", "label_source": BY_NAME, "reasons": [], **amounts}
        if not (
            isinstance(answer["prediction_id"], str) and isinstance(answer["label_source"], str)
        ):
            raise TypeError
        return {
            name: answer[name]
            for name in ("prediction_id", "label_source", "expected_bytes", "safe_bytes", "reasons")
        }
    except TimeoutError:
        raise Skip(f"the service did not answer within {settings.timeout_seconds:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise Skip(f"the service cannot be asked ({type(error).__name__})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Skip("the service's answer is none of gpumemnet: is the URL right?") from None


def amounts(answer: Document) -> tuple[int, int]:
    """Request and limit, in MiB, rounded up.

    Raises:
        Skip: when there is no limit, with the service's reason.
    """
    request, limit = answer["expected_bytes"], answer["safe_bytes"]
    if type(request) is not int or type(limit) is not int or not 0 < request <= limit:
        reasons = answer["reasons"]
        raise Skip(
            f"no safe amount is known for this job: {reasons[0] if reasons else 'no reason given'}"
        )
    return -(-request // 2**20), -(-limit // 2**20)


def place_of(settings: Settings, pod: Document) -> int | None:
    """Index of the container that the amount belongs to, or ``None`` where it belongs to the pod.

    Raises:
        Skip: when the pod asks for no GPU, says the amount itself, or leaves open which container
            is meant.
    """
    containers = pod["spec"]["containers"]
    annotations = pod["metadata"]["annotations"]
    if settings.mode == "kai":
        if KAI_MEMORY in annotations or KAI_FRACTION in annotations:
            raise Skip("")
        if any(
            asked(container, WHOLE_GPU)
            for container in (*containers, *pod["spec"].get("initContainers", ()))
        ):
            raise Skip(
                f"KAI refuses a pod that asks for {WHOLE_GPU} and for {KAI_MEMORY}: leave the former out to share a GPU"
            )
        return None
    field = FIELDS[settings.mode]
    name = annotations.get(CONTAINER)
    candidates = [
        index
        for index, container in enumerate(containers)
        if asked(container, field.asks) and name in (None, container.get("name"))
    ]
    if not candidates:
        raise Skip(f"no container {'called ' + name + ' ' if name else ''}asks for {field.asks}")
    if len(candidates) > 1:
        raise Skip(
            f"{len(candidates)} containers ask for {field.asks}: name the one that runs the job in {CONTAINER}"
        )
    if any(
        stated(containers[candidates[0]], resource) for resource in (field.memory, *field.others)
    ):
        raise Skip("")
    return candidates[0]


def stated(container: Document, resource: str) -> Any:
    """The amount of a resource that a container states, or ``None``."""
    resources = container.get("resources") or {}
    return next(
        (
            amount[resource]
            for kind in ("limits", "requests")
            if resource in (amount := resources.get(kind) or {})
        ),
        None,
    )


def asked(container: Document, resource: str) -> bool:
    """Whether a container asks for some of a resource."""
    return str(stated(container, resource) or "0") != "0"


def patch(settings: Settings, pod: Document, place: int | None, answer: Document) -> list[Document]:
    """The JSON patch (RFC 6902) that writes the amount and where it comes from."""
    request, limit = amounts(answer)
    annotations = {LABEL_SOURCE: answer["label_source"]}
    if answer["prediction_id"]:
        annotations[PREDICTION_ID] = answer["prediction_id"]
    steps: list[Document] = []
    if place is None:
        annotations[KAI_MEMORY] = str(request)
    else:
        container = pod["spec"]["containers"][place]
        at = f"/spec/containers/{place}/resources"
        unit_mib = settings.volcano_memory_factor if settings.mode == "volcano" else 1
        if not container.get("resources"):
            steps.append(_add(at, {}))
        if not (container.get("resources") or {}).get("limits"):
            steps.append(_add(f"{at}/limits", {}))
        steps.append(
            _add(
                f"{at}/limits/{_escaped(FIELDS[settings.mode].memory)}", str(-(-limit // unit_mib))
            )
        )
    return steps + [
        _add(f"/metadata/annotations/{_escaped(name)}", text) for name, text in annotations.items()
    ]


def _add(path: str, value: Any) -> Document:
    return {"op": "add", "path": path, "value": value}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


async def review(client: httpx.AsyncClient, settings: Settings, request: Document) -> Document:
    """The ``response`` of an AdmissionReview for its ``request``: always allowed, at most with a
    patch or a warning."""
    response: Document = {"uid": request["uid"], "allowed": True}
    try:
        pod = request.get("object")
        if (
            request.get("operation") != "CREATE"
            or request.get("subResource")
            or not isinstance(pod, dict)
            or pod.get("kind") != "Pod"
        ):
            return response
        annotations = (pod.get("metadata") or {}).get("annotations") or {}
        if annotations.keys().isdisjoint((JOB, MODEL)) or PREDICTION_ID in annotations:
            return response
        place = place_of(settings, pod)
        operation, content = question_of(annotations, annotations.get(GPU) or settings.gpu)
        if request.get("dryRun") and operation == "predict":
            raise Skip("not asked in a dry run, because the service keeps what it predicts")
        answer = await ask(client, settings, operation, content)
        steps = patch(settings, pod, place, answer)
    except Skip as reason:
        if str(reason):
            logger.info("pod of %s left as it is: %s", request.get("namespace"), reason)
            response["warnings"] = [f"gpumemnet: {reason}"[:MAX_WARNING_CHARACTERS]]
        return response
    except (LookupError, TypeError, AttributeError):  # no pod that an API server sends
        response["warnings"] = [
            "gpumemnet: the pod is not of the expected shape; it is left as it is"
        ]
        return response
    except Exception:
        logger.exception("pod of %s left as it is", request.get("namespace"))
        response["warnings"] = [
            "gpumemnet: the webhook could not read this pod; it is left as it is"
        ]
        return response
    response["patchType"] = "JSONPatch"
    response["patch"] = base64.b64encode(json.dumps(steps).encode()).decode()
    return response


def create_app(settings: Settings) -> Starlette:
    """The webhook as an ASGI application: ``POST /mutate`` for the API server, ``GET /healthz`` for
    the kubelet."""
    client = httpx.AsyncClient(timeout=settings.timeout_seconds, trust_env=False)

    async def mutate(request: Request) -> Response:
        try:
            body = b""
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_REVIEW_BYTES:
                    return Response("the review is too large", 413, {"Connection": "close"})
            document = json.loads(body)
            asked_for = document["request"]
            if document["apiVersion"] != "admission.k8s.io/v1" or not isinstance(
                asked_for["uid"], str
            ):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            return Response(
                "an AdmissionReview of admission.k8s.io/v1 with a request is expected", 400
            )
        answer = await review(client, settings, asked_for)
        return JSONResponse(
            {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
        )

    async def healthz(_: Request) -> Response:
        return Response("ok")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    routes = [Route("/mutate", mutate, methods=["POST"]), Route("/healthz", healthz)]
    return Starlette(routes=routes, lifespan=lifespan)


async def keep_certificate(load: Callable[[], None], files: Sequence[Path]) -> None:
    """Load the certificate again whenever its files have changed: cert-manager renews them under a
    running process."""

    def state() -> list[int]:
        return [file.stat().st_mtime_ns for file in files]

    seen = state()
    while True:
        await asyncio.sleep(CERTIFICATE_LOOK_SECONDS)
        try:
            if state() != seen:
                load()
                seen = state()
        except OSError as error:  # half-written; SSL errors are of this kind too
            logger.warning("the certificate cannot be loaded yet, the old one stays: %s", error)


async def serve(settings: Settings, host: str, port: int, certificate: Path, key: Path) -> None:
    """Answer until SIGTERM."""
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    config.load()
    context = config.ssl
    assert context is not None
    watch = asyncio.create_task(
        keep_certificate(lambda: context.load_cert_chain(certificate, key), (certificate, key))
    )
    try:
        await uvicorn.Server(config).serve()
    finally:
        watch.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the webhook; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Fill the GPU memory field of pods with what gpumemnet predicts."
    )
    parser.add_argument(
        "--mode", choices=MODES, required=True, help="the system that shares the GPUs"
    )
    parser.add_argument(
        "--url",
        required=True,
        help="address of the prediction service, such as http://gpumemnet:8000",
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        required=True,
        help="TLS certificate (PEM) for the webhook's service name",
    )
    parser.add_argument("--key", type=Path, required=True, help="its private key (PEM)")
    parser.add_argument("--api-key-file", type=Path, help="file with an API key of scope predict")
    parser.add_argument(
        "--gpu",
        default="",
        help="GPU to ask for unless the pod says; see GET /v1/gpus of the service",
    )
    parser.add_argument(
        "--volcano-memory-factor",
        type=_whole,
        default=1,
        help="--gpu-memory-factor of Volcano's device plugin",
    )
    parser.add_argument(
        "--timeout-seconds",
        type=_seconds,
        default=0.5,
        help="for the question; below the webhook's timeoutSeconds",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104  the API server comes from outside
    parser.add_argument("--port", type=int, default=8443, help="port to listen on")
    chosen = parser.parse_args(arguments)
    settings = Settings(
        chosen.mode,
        chosen.url.rstrip("/"),
        chosen.api_key_file,
        chosen.gpu,
        chosen.volcano_memory_factor,
        chosen.timeout_seconds,
    )
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    try:
        asyncio.run(serve(settings, chosen.host, chosen.port, chosen.certificate, chosen.key))
    except OSError as error:
        parser.exit(2, f"webhook: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < 30:
        raise argparse.ArgumentTypeError("must be between 0 and 30")
    return number


if __name__ == "__main__":
    sys.exit(main())
