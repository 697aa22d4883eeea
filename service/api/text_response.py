"""Predictions as plain text, for shell scripts that want a number and not a document.

A script asks with ``Accept: text/plain`` and gets ``limit_mib`` and a newline, or the fields that it names with
``?field=``, in their order on one line::

    limit=$(curl -sf --max-time 0.5 -H 'Accept: text/plain' -H 'Content-Type: application/json' \
        --data-binary @job.json http://127.0.0.1:8000/v1/predict) || limit=$SITE_DEFAULT
    read -r request limit id < <(curl -sf … 'http://127.0.0.1:8000/v1/predict?field=request_mib,limit_mib,prediction_id')

Where a field has no value, because the job lies outside the model's support, the answer is a 422: ``curl -f`` then prints nothing
and fails, and the script goes on with the default of its site.  Every other error does the same.
"""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe

from .endpoint import JSON, JsonEndpoint, send_answer
from .problems import OUTSIDE_SUPPORT, Refusal

PLAIN: Final = "text/plain"
PLAIN_FIELDS: Final = ("limit_mib", "request_mib", "safe_bytes", "expected_bytes", "prediction_id")
"""What may be asked for; the first is what one gets unless asked."""

_PLAIN_UTF8: Final = f"{PLAIN}; charset=utf-8"
_ANYTHING: Final = (b"*/*", JSON.encode())


class NegotiatedEndpoint(JsonEndpoint):
    """A :class:`~service.api.endpoint.JsonEndpoint` whose prediction may also be had as plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            HTTPException: 415 when the body is not declared as JSON; 422 when a wanted field has no value.
            FieldError: when something in the body or the query is at fault.
        """
        names = plain_fields(query) if (query := scope["query_string"]) else PLAIN_FIELDS[:1]
        if not wants_plain(scope):
            await super().__call__(scope, receive, send)
            return

        async def send_plain(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                body = message["body"]
                assert isinstance(body, bytes)
                await send_answer(send, 200, _PLAIN_UTF8, plain_text(body, names))

        await super().__call__(scope, receive, send_plain)  # type: ignore[arg-type]


def wants_plain(scope: Scope) -> bool:
    """Whether the caller would rather have plain text than JSON (RFC 9110, section 12.5.1)."""
    for name, value in scope["headers"]:
        if name == b"accept":
            return value not in _ANYTHING and _prefers_plain(value.decode("latin-1"))
    return False


def plain_fields(query: bytes) -> tuple[str, ...]:
    """The fields that a query asks for.

    Raises:
        InvalidRequestError: when it names another parameter or an unknown field.
    """
    names: list[str] = []
    for parameter, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if parameter != "field":
            raise InvalidRequestError("is not a parameter: known is field", describe(parameter[:64]))
        names += value.split(",")
    for name in names:
        if name not in PLAIN_FIELDS:
            raise InvalidRequestError(f"must be one of {', '.join(PLAIN_FIELDS)}, not {describe(name)}", "field")
    return tuple(names) or PLAIN_FIELDS[:1]


def plain_text(prediction: bytes, names: tuple[str, ...]) -> bytes:
    """The line with the named fields of a prediction in JSON.

    Raises:
        Refusal: when one has no value.
    """
    document = json.loads(prediction)  # and not by orjson, which makes floats of the largest integers
    for name in names:
        if document[name] is None:
            raise Refusal(OUTSIDE_SUPPORT, f"there is no {name}: {'; '.join(document['reasons'])}")
    return " ".join(str(document[name]) for name in names).encode() + b"\n"


def _prefers_plain(accept: str) -> bool:
    qualities: dict[str, float] = {}
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
        try:
            qualities[media] = min(max(float(quality), 0.0), 1.0)
        except ValueError:
            qualities[media] = 0.0
    anything = qualities.get("*/*", 0.0)
    plain = qualities.get(PLAIN, qualities.get("text/*", anything))
    return plain > qualities.get(JSON, qualities.get("application/*", anything))
