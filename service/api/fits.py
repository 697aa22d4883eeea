"""Answers "will it fit?" for a model's name over HTTP: ``POST /v1/fit``, and the names of the
catalogue that a search box suggests.

The answer is that of :func:`gpumemnet.fit`, from the catalogue or from the ``config.json`` in the
body: no name reads a file of the service or asks the hub.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, get_type_hints

from pydantic import Field, create_model

from gpumemnet.atomic_files import Document
from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.named import fit as named
from gpumemnet.named.catalogue import (
    NamedModel,
    find_in_catalogue,
    search_names,
    unknown_model,
)
from gpumemnet.named.methods import CHOICES, COUNTS, STATED, Method

from .handlers import read_query, read_request
from .schemas import OneOf, Schema, attribute_descriptions, described

MAX_NAMES: Final = 20
"""Most names in one answer to a search."""
MAX_TEXT: Final = 200
"""Most characters of a text in a request."""
_CONFIG: Final = "config.json"
_REMEDY: Final = "send its config.json as `config` instead; /v1/fit/models lists the names"


def _options() -> dict[str, Any]:
    hints, descriptions = get_type_hints(Method), attribute_descriptions(Method)
    found: dict[str, Any] = {}
    for name in (*STATED, "gpus"):
        hint = hints[name]
        if name in CHOICES:
            hint = Annotated[str, OneOf(CHOICES[name])]
        elif name in COUNTS:
            hint = Annotated[int, Field(ge=1, le=COUNTS[name])]
        elif hint is str:
            hint = Annotated[str, Field(max_length=MAX_TEXT)]
        found[name] = (hint | None, Field(default=None, description=descriptions[name]))
    return found


FitRequest = create_model(
    "FitRequest",
    __base__=Schema,
    __doc__="A model by its name or its configuration, how it is fine-tuned, and on which GPU. What is not stated "
    "has the default that trainers have; the answer's `method` says all of it.",
    model=(
        Annotated[str, Field(max_length=MAX_TEXT)] | None,
        Field(
            default=None,
            description="a name of the catalogue, as `/v1/fit/models` lists them; or what a given `config` is called",
            examples=["Qwen/Qwen3-8B"],
        ),
    ),
    config=(
        dict[str, Any] | None,
        Field(default=None, description="the content of a config.json, for any other model"),
    ),
    gpu=(
        Annotated[str, Field(max_length=MAX_TEXT)] | None,
        Field(
            default=None,
            description="the GPU, by a name in /v1/gpus; 8xH100 means eight of them",
            examples=["RTX-4090"],
        ),
    ),
    **_options(),
)


class FitTableRow(Schema):
    """Safe bytes of one method, with or without checkpointing."""

    method: str
    checkpointing: bool
    safe_bytes: dict[str, int]
    """safe bytes at each sequence length or batch size"""


_METHOD: Any = described("FitMethod", "How it is trained, with every default.", Method)
_CHANGE: Any = described("FitChange", "A change that makes the job fit.", named.Change)
FitAnswer = described(
    "FitAnswer",
    "Whether a fine-tuning job fits, what its memory is made of, and what would fit; `fits` is true where no GPU was "
    "named.",
    named.FitAnswer,
    method=_METHOD,
    table=list[FitTableRow],
    changes=list[_CHANGE],
    fits=bool,
)


class CatalogueModel(Schema):
    """A model that a request may name."""

    name: str
    parameters: int = Field(ge=0)
    """total of its parameters"""


class CatalogueModels(Schema):
    """Models of the catalogue, those whose names begin with the text first."""

    models: list[CatalogueModel] = Field(max_length=MAX_NAMES)


def fit_document(body: bytes) -> Document:
    """The response to ``POST /v1/fit``.

    Raises:
        InvalidRequestError: with the field's path from ``body``.
    """
    request: Any = read_request(body, FitRequest)
    gpu = request.gpu
    if gpu is not None and gpu.endswith(".json"):
        raise InvalidRequestError("must be a name in /v1/gpus", "gpu")
    stated = {name: getattr(request, name) for name in (*STATED, "gpus")}
    options = {name: value for name, value in stated.items() if value is not None}
    try:
        answer = named.fit(_model(request), gpu=gpu, **options)
    except FieldError as error:
        if request.config is None or error.field != "model":
            raise
        raise InvalidRequestError(error.reason, "config") from None
    return answer.document()


def _model(request: Any) -> NamedModel:
    if request.config is not None:
        return NamedModel(request.model or _CONFIG, request.config, "the request")
    if request.model is None:
        raise InvalidRequestError(f"is missing: name a model, or {_REMEDY}", "model")
    found = find_in_catalogue(request.model)
    if found is None:
        raise unknown_model(request.model, _REMEDY)
    return found


def names_document(query: bytes) -> Document:
    """The response to ``GET /v1/fit/models``.

    Raises:
        InvalidRequestError: the query has another parameter, or a text that is too long.
    """
    text = (read_query(query, "search") or [""])[-1]
    if len(text) > MAX_TEXT:
        raise InvalidRequestError(f"must have at most {MAX_TEXT} characters", "search")
    found = search_names(text, MAX_NAMES)
    return {"models": [{"name": each.name, "parameters": each.parameters} for each in found]}
