"""The protocol's paths and its error format: ``{"error": …}`` and not a problem document.

One small application serves everything under ``/v2``, so that every error, an unknown path
included, has the format that the protocol's clients expect.  The gate has checked the key and the
rate before.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, Protocol

import orjson
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from gpumemnet.errors import FieldError
from gpumemnet.units import MIB

from ..api.endpoint import read_body
from ..api.examples import EXAMPLE_JOBS
from ..api.operations import BODY_REFUSALS, JSON, Answer, Operation, Schemas, routes
from ..api.predictions import PredictionApi
from ..api.routes import NOT_READY
from ..middleware.limits import handle_body
from . import schemas
from .models import OipModel, oip_models
from .outputs import OUTPUTS, output_tensors
from .request import INPUT_DATATYPE, INPUT_NAME, read_infer_request

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
RAW: Final = "application/octet-stream"
EXTENSIONS: Final = ("binary_tensor_data",)
PLATFORM: Final = "gpumemnet_onnx"
SPECIFICATION: Final = "https://github.com/kserve/open-inference-protocol"

logger = logging.getLogger("gpumemnet.service")


_MODEL: Final = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "`gpumemnet` for the whole service, or the name of one bundle",
    "example": "gpumemnet",
}
_VERSION: Final = {
    "name": "version",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "its version",
}
_REFUSALS: Final = {
    400: "The request or one of its jobs is invalid; no job is predicted then.",
    404: "The model or version is unknown.",
    408: BODY_REFUSALS[408],
    413: BODY_REFUSALS[413],
    415: "The body is neither JSON nor JSON followed by raw tensors, or it is compressed.",
    503: NOT_READY,
}
_OUTPUT_LIST: Final = "".join(
    f"\n* `{output.name}` ({output.datatype}): {output.meaning}" for output in OUTPUTS
)

Handler = Callable[[Request], Awaitable[Response]]


def _infer_examples() -> dict[str, Any]:
    example = {
        "id": "42",
        "inputs": [
            {
                "name": "job",
                "datatype": "BYTES",
                "shape": [1],
                "data": [orjson.dumps(EXAMPLE_JOBS["mlp"]).decode()],
            }
        ],
        "outputs": [{"name": "expected_bytes"}, {"name": "safe_bytes"}, {"name": "in_support"}],
        "parameters": {"coverage": 0.99},
    }
    return {"job": example}


class ServedRelease(Protocol):
    """Gives the current api."""

    @property
    def api(self) -> PredictionApi:
        """The current api; a model swap replaces it."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent here."""
        ...


class _WholePath(PathConvertor):
    """The rest of a path, line breaks included: Starlette's converter stops at them, and the error
    would have another format."""

    regex = r"[\s\S]*"


register_url_convertor("whole", _WholePath())


class _Endpoint:
    """ASGI application of a function: Starlette's own would handle errors before
    :class:`OipApplication` sees them."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)


class OipApplication:
    """ASGI application for everything under ``/v2``."""

    def __init__(self, serving: ServedRelease) -> None:
        self._serving = serving
        self._of_api: tuple[PredictionApi | None, dict[str, OipModel]] = (None, {})
        self.operations = self._operations()
        root = Route("/v2/", _Endpoint(self._server), methods=["GET"])
        self.routes = [Route("/v2", self), Route("/v2/{rest:whole}", self)]
        self._router = Router(
            [*routes(self.operations), root], redirect_slashes=False, default=_nothing_there
        )

    def _operations(self) -> list[Operation]:
        def operation(
            method: str,
            path: str,
            name: str,
            summary: str,
            handler: Handler,
            shape: Schemas,
            refusals: Sequence[int] = (),
            **more: Any,
        ) -> Operation:
            names = {"model": _MODEL, "version": _VERSION}
            others = more.pop("others", None)
            return Operation(
                method=method,
                path=path,
                name=name,
                tag="open inference protocol",
                summary=summary,
                endpoint=_Endpoint(handler),
                answers={200: Answer(shape=shape, others=others)},
                refusals={status: _REFUSALS[status] for status in refusals},
                refusal_schema=schemas.OipError,
                refusal_type=JSON,
                parameters=[
                    parameter for name, parameter in names.items() if f"{{{name}}}" in path
                ],
                **more,
            )

        found = [
            operation(
                "GET", "/v2", "oip_server", "Server metadata", self._server, schemas.OipServer
            ),
            operation(
                "GET", "/v2/health/live", "oip_live", "Server liveness", self._live, schemas.OipLive
            ),
            operation(
                "GET",
                "/v2/health/ready",
                "oip_ready",
                "Readiness: may requests be sent here?",
                self._ready,
                schemas.OipReady,
                [503],
            ),
            operation(
                *(
                    "POST",
                    "/v2/repository/index",
                    "oip_index",
                    "Repository index: the loaded models",
                    self._index,
                ),
                [schemas.OipIndexEntry],
            ),
        ]
        for suffix, path in (
            ("", "/v2/models/{model}"),
            ("_version", "/v2/models/{model}/versions/{version}"),
        ):
            found += [
                operation(
                    *("GET", path, f"oip_model{suffix}", "Model metadata", self._model),
                    *(schemas.OipModelMetadata, [404]),
                ),
                operation(
                    *(
                        "GET",
                        f"{path}/ready",
                        f"oip_model{suffix}_ready",
                        "Model readiness",
                        self._model_ready,
                    ),
                    *(schemas.OipModelReady, [404]),
                ),
                operation(
                    *("POST", f"{path}/infer", f"oip_infer{suffix}", "Predict jobs", self._infer),
                    *(schemas.OipAnswer, [400, 404, 408, 413, 415]),
                    description=f"The Open Inference Protocol, version 2 ({SPECIFICATION}). Outputs:{_OUTPUT_LIST}",
                    request=schemas.OipRequest,
                    request_examples=_infer_examples,
                    others=lambda: {RAW: {"schema": {"type": "string", "format": "binary"}}},
                ),
            ]
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request, with errors in the protocol's format."""
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._router(scope, receive, watched)
        except FieldError as error:
            await _error(400, str(error))(scope, receive, send)
        except HTTPException as error:
            detail = error.detail
            if error.status_code == 405:
                allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
                detail = f"{scope['path'][:200]} answers to {allowed}, not to {scope['method']}"
            await _error(error.status_code, detail, error.headers)(scope, receive, send)
        except Exception:
            if not has_started:
                await _error(
                    500, "an unexpected error occurred; the cause is in the log of the service"
                )(scope, receive, send)
            raise  # the server logs the exception

    def _models(self) -> dict[str, OipModel]:
        """The models of the current api."""
        api = self._serving.api
        known, models = self._of_api
        if known is not api:
            models = oip_models(api)
            self._of_api = api, models
        return models

    def _requested_model(self, request: Request) -> OipModel:
        models = self._models()
        name, version_name = request.path_params["model"], request.path_params.get("version")
        model = models.get(name)
        if model is None:
            raise HTTPException(
                404, f"there is no model {name[:100]!r}: models are {', '.join(models)}"
            )
        if version_name not in (None, model.version):
            raise HTTPException(
                404,
                f"there is no version {version_name[:100]!r} of {name}: it has {model.version!r}",
            )
        return model

    async def _server(self, request: Request) -> Response:
        return _json(
            {"name": "gpumemnet", "version": version("gpumemnet"), "extensions": EXTENSIONS}
        )

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        if not self._serving.is_ready:
            raise HTTPException(
                503,
                "the registry's champion cannot be served; the cause is in the log of the service",
            )
        return _json({"ready": True})

    async def _index(self, request: Request) -> Response:
        entries = [
            {"name": model.name, "version": model.version, "state": "READY", "reason": ""}
            for model in self._models().values()
        ]
        return _json(entries)

    async def _model(self, request: Request) -> Response:
        model = self._requested_model(request)
        outputs = [
            {"name": output.name, "datatype": output.datatype, "shape": output.shape}
            for output in OUTPUTS
        ]
        return _json(
            {
                "name": model.name,
                "versions": [model.version],
                "platform": PLATFORM,
                "inputs": [{"name": INPUT_NAME, "datatype": INPUT_DATATYPE, "shape": [-1]}],
                "outputs": outputs,
                "parameters": model.facts,
            }
        )

    async def _model_ready(self, request: Request) -> Response:
        model = self._requested_model(request)
        return _json({"name": model.name, "ready": True})

    async def _infer(self, request: Request) -> Response:
        model = self._requested_model(request)
        _check_media_type(request)
        body = await read_body(request.receive)
        if body is None:
            return Response(status_code=400)  # the client has disconnected
        header = request.headers.get(HEADER_LENGTH)
        header_length = None if header is None else header.encode("latin-1")
        return await handle_body(lambda body: infer(model, body, header_length), body)


def infer(model: OipModel, body: bytes, header_length: bytes | None) -> Response:
    """The response to an inference request.

    Raises:
        FieldError: when a field of the request is invalid.
    """
    request = read_infer_request(body, header_length, model.api.max_jobs)
    tensors = output_tensors(model.predict(request), {output.name for output in request.outputs})
    outputs, raw = [], []
    for output in request.outputs:
        tensor = tensors[output.name]
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if output.is_binary:
            raw.append(tensor.as_bytes())
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = tensor.as_json()
        outputs.append(entry)
    answer = {
        "model_name": model.name,
        "model_version": model.version,
        **({} if request.id is None else {"id": request.id}),
        "parameters": {
            "coverage": request.options.coverage,
            "bin_width_mib": request.bins.width_bytes // MIB,
        },
        "outputs": outputs,
    }
    document = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    if not raw:
        return Response(document, media_type=JSON)
    return Response(
        b"".join((document, *raw)), headers={HEADER_LENGTH: str(len(document))}, media_type=RAW
    )


async def _nothing_there(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(
        404, f"there is nothing at {scope['path'][:200]}: the paths are listed at /docs"
    )


def _check_media_type(request: Request) -> None:
    """Reject media types that a form of any web page can send; a missing one is accepted, because
    Triton's client sends none."""
    media_type = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media_type not in (JSON, RAW):
        raise HTTPException(
            415,
            f"the body must be sent with 'Content-Type: {JSON}', or {RAW} with raw tensors behind it",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(
            415,
            f"a body with 'Content-Encoding: {encoding[:40]}' is not read: send it uncompressed",
        )


def _json(document: Any) -> Response:
    return Response(orjson.dumps(document), media_type=JSON)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps({"error": message}), status, headers, JSON)
