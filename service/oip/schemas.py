"""Request and response models of the protocol."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from ..api.requests import MAX_BIN_WIDTH_MIB, MIN_BIN_WIDTH_MIB, Coverage, Encoder
from ..api.schemas import OneOf, Schema
from .outputs import OUTPUT_NAMES

DEFAULT_BIN_WIDTH_MIB: Final = 1024
"""Bins reach to 192 GiB for every GPU: a tensor has the same columns in all rows."""


class OipError(Schema):
    """An error of the Open Inference Protocol."""

    error: str = Field(description="what is wrong, where, and what to do")


class OipServer(Schema):
    """What the server is."""

    name: str
    version: str
    extensions: list[str] = Field(description="extensions of the protocol that it knows")


class OipLive(Schema):
    """The process is alive."""

    live: Literal[True]


class OipReady(Schema):
    """A tested release is served."""

    ready: Literal[True]


class OipModelReady(Schema):
    """The model answers."""

    name: str
    ready: Literal[True]


class OipTensorMetadata(Schema):
    """An input or an output of a model."""

    name: str
    datatype: str
    shape: list[int] = Field(description="-1 where the size varies")


class OipModelMetadata(Schema):
    """What a model is, takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[OipTensorMetadata]
    outputs: list[OipTensorMetadata]
    parameters: dict[str, str] = Field(
        description="what this service says of it beyond the protocol: its hash, family, GPU"
    )


class OipIndexEntry(Schema):
    """A model that is loaded."""

    name: str
    version: str
    state: Literal["READY"]
    reason: str


class OipInputParameters(Schema):
    """How the elements are sent."""

    binary_data_size: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="bytes of the tensor in raw form behind the JSON object, instead of `data`",
    )
    content_type: Literal["str"] | None = Field(
        default=None, description="as MLServer's client sends it"
    )


class OipInput(Schema):
    """The jobs: each element is the JSON document of a job, as in `/v1`."""

    name: Literal["job"]
    datatype: Literal["BYTES"]
    shape: list[int] = Field(description="[n] or [n, 1] for n jobs", min_length=1, max_length=2)
    data: list[str | list[str]] | None = Field(
        default=None, description="JSON documents as texts, in rows or one after the other"
    )
    parameters: OipInputParameters | None = None


class OipOutputParameters(Schema):
    """The form of an output."""

    binary_data: bool | None = Field(default=None, description="in raw form behind the JSON object")


class OipRequestedOutput(Schema):
    """A requested output."""

    name: Annotated[str, OneOf(OUTPUT_NAMES)]
    parameters: OipOutputParameters | None = None


class OipParameters(Schema):
    """The options of the predictions; members of other servers' extensions are ignored."""

    coverage: Coverage = None
    bin_width_mib: Annotated[int, Field(ge=MIN_BIN_WIDTH_MIB, le=MAX_BIN_WIDTH_MIB)] | None = Field(
        default=None,
        description="width of the bins in MiB",
        json_schema_extra={"default": DEFAULT_BIN_WIDTH_MIB},
    )
    gpu: str | None = Field(default=None, description="the GPU; by default the service's")
    encoder: Encoder = None
    binary_data_output: bool | None = Field(
        default=None, description="all outputs in raw form unless they say otherwise"
    )
    priority: Any = None
    timeout: Any = None
    content_type: Any = None
    headers: Any = None


class OipRequest(Schema):
    """An inference request."""

    id: str | None = Field(default=None, description="repeated in the answer")
    inputs: list[OipInput] = Field(min_length=1, max_length=1, description="the tensor `job`")
    outputs: list[OipRequestedOutput] | None = Field(
        default=None, description="the requested outputs; by default all"
    )
    parameters: OipParameters | None = None
    model_name: str | None = Field(default=None, description="ignored: the path decides")
    model_version: str | None = Field(default=None, description="ignored: the path decides")


class OipOutput(Schema):
    """An output of a prediction."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float | int | bool | str] | None = Field(
        default=None, description="elements row by row, unless sent in raw form"
    )
    parameters: dict[str, int] | None = Field(
        default=None, description="binary_data_size, where it is sent in raw form"
    )


class OipAnswer(Schema):
    """The answer to an inference request."""

    model_name: str
    model_version: str
    id: str | None = Field(default=None, description="that of the request")
    parameters: dict[str, float | int] = Field(
        description="the coverage and bin_width_mib of the predictions"
    )
    outputs: list[OipOutput]
