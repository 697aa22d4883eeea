"""Predictions as plain text, for shell scripts that need a number and not a document.

A script sends ``Accept: text/plain`` and gets ``limit_mib`` and a newline, or the fields that it
    names with
``?field=``, in their order on one line::

    limit=$(curl -sf --max-time 0.5 -H 'Accept: text/plain' -H 'Content-Type: application/json' \
        --data-binary @job.json http://127.0.0.1:8000/v1/predict) || limit=$SITE_DEFAULT
    read -r request limit id < <(curl -sf …
    'http://127.0.0.1:8000/v1/predict?field=request_mib,limit_mib,prediction_id')

When a field has no value, because the job lies outside the model's support, the status is 422:
``curl -f`` then prints nothing and fails, and the script uses its site's default.  Every other
error has the same effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.types import Scope

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe

from .operations import JSON
from .problems import OUTSIDE_SUPPORT, Refusal

TEXT: Final = "text/plain"
TEXT_FIELDS: Final = (
    "limit_mib",
    "request_mib",
    "safe_bytes",
    "expected_bytes",
    "startup_peak_bytes",
    "prediction_id",
)
"""The fields that a script may request; the first is the default."""

TEXT_UTF8: Final = f"{TEXT}; charset=utf-8"
_ANYTHING: Final = (b"*/*", JSON.encode())


def wants_text(scope: Scope) -> bool:
    """Whether the caller prefers plain text to JSON (RFC 9110, section 12.5.1)."""
    for name, value in scope["headers"]:
        if name == b"accept":
            return value not in _ANYTHING and _prefers_text(value.decode("latin-1"))
    return False


def text_fields(query: bytes) -> tuple[str, ...]:
    """The fields that a query requests.

    Raises:
        InvalidRequestError: when it names another parameter or an unknown field.
    """
    names: list[str] = []
    for parameter, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if parameter != "field":
            raise InvalidRequestError(
                "is not a parameter: known is field", describe(parameter[:64])
            )
        names += value.split(",")
    for name in names:
        if name not in TEXT_FIELDS:
            raise InvalidRequestError(
                f"must be one of {', '.join(TEXT_FIELDS)}, not {describe(name)}", "field"
            )
    return tuple(names) or TEXT_FIELDS[:1]


def text_of(prediction: Mapping[str, Any], names: tuple[str, ...]) -> bytes:
    """The line with the requested fields of a prediction.

    Raises:
        Refusal: when one has no value.
    """
    for name in names:
        if prediction[name] is None:
            raise Refusal(
                OUTSIDE_SUPPORT, f"there is no {name}: {'; '.join(prediction['reasons'])}"
            )
    return " ".join(str(prediction[name]) for name in names).encode() + b"\n"


def _prefers_text(accept: str) -> bool:
    qualities: dict[str, float] = {}
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next(
            (parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1"
        )
        try:
            qualities[media] = min(max(float(quality), 0.0), 1.0)
        except ValueError:
            qualities[media] = 0.0
    anything = qualities.get("*/*", 0.0)
    plain = qualities.get(TEXT, qualities.get("text/*", anything))
    return plain > qualities.get(JSON, qualities.get("application/*", anything))
