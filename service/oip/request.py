"""Reads an inference request: the jobs, the options, and the requested outputs with their form.

The request is the protocol's ``$inference_request`` (:class:`service.oip.schemas.OipRequest`);
:mod:`gpumemnet.job.json_codec` reads the jobs in it.  Unknown parameters are rejected and never
ignored: a misspelt ``coverage`` would change the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.job.json_codec import parse_json
from gpumemnet.job.layers import describe
from gpumemnet.predict.bins import BinScheme, bins_of_width
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB

from ..api.problems import located
from ..api.requests import Options, read_request
from ..middleware.limits import MAX_PROBABILITIES
from .outputs import OUTPUT_NAMES
from .schemas import DEFAULT_BIN_WIDTH_MIB, OipInput, OipParameters, OipRequest, OipRequestedOutput
from .tensors import split_bytes

INPUT_NAME: Final = "job"
INPUT_DATATYPE: Final = "BYTES"


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One requested output, and whether it is sent in raw form."""

    name: str
    is_binary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """An inference request.

    Attributes:
        id: the client's name for the request, which the response repeats.
        documents: the JSON documents of the jobs; at least one.
        options: the options of the predictions; the bin scheme is always set.
        outputs: the requested outputs, in this order.
    """

    id: str | None
    documents: Sequence[Any]
    options: Options
    bins: BinScheme
    outputs: Sequence[RequestedOutput]


def read_infer_request(body: bytes, header_length: bytes | None, max_jobs: int) -> InferRequest:
    """The request in ``body``.

    Args:
        body: a JSON object, followed by the raw form of the inputs that declare it.
        header_length: the header ``Inference-Header-Content-Length``: bytes of the JSON object,
            when raw inputs follow it.
        max_jobs: most jobs.

    Raises:
        InvalidRequestError, InvalidJobError: with the field's path from the body.
    """
    length = _header_length(header_length, len(body))
    request = read_request(body[:length], OipRequest)
    parameters = request.parameters or OipParameters()
    outputs = _outputs(request.outputs or (), parameters.binary_data_output or False)
    texts = _elements(request.inputs[0], body[length:])
    if len(texts) > max_jobs:
        raise InvalidRequestError(
            f"must hold at most {max_jobs} jobs, not {len(texts)}: send several requests",
            INPUT_NAME,
        )
    bins = bins_of_width((parameters.bin_width_mib or DEFAULT_BIN_WIDTH_MIB) * MIB)
    if len(texts) * bins.count > MAX_PROBABILITIES and any(
        output.name == "probabilities" for output in outputs
    ):
        raise InvalidRequestError(
            f"gives {bins.count} bins for each of {len(texts)} jobs, and an answer holds at most {MAX_PROBABILITIES} "
            "probabilities: ask for wider bins, for fewer jobs, or for other outputs",
            "parameters.bin_width_mib",
        )
    coverage = DEFAULT_COVERAGE if parameters.coverage is None else parameters.coverage
    return InferRequest(
        id=request.id,
        documents=[_document(text, index) for index, text in enumerate(texts)],
        options=Options(
            coverage=coverage, bins=bins, gpu=parameters.gpu, encoder=parameters.encoder
        ),
        bins=bins,
        outputs=outputs,
    )


def _header_length(header: bytes | None, body_length: int) -> int:
    if header is None:
        return body_length
    if not (header.isdigit() and len(header) <= 12 and int(header) <= body_length):
        raise InvalidRequestError(
            f"must be the length in bytes of the JSON object that the body of {body_length} bytes begins with",
            "header Inference-Header-Content-Length",
        )
    return int(header)


def _outputs(
    requested: Sequence[OipRequestedOutput], default_binary: bool
) -> Sequence[RequestedOutput]:
    if not requested:  # the protocol's default: all outputs
        return [RequestedOutput(name, default_binary) for name in OUTPUT_NAMES]
    outputs: list[RequestedOutput] = []
    for index, output in enumerate(requested):
        if any(output.name == earlier.name for earlier in outputs):
            raise InvalidRequestError(
                f"is asked for twice: {output.name}", f"outputs[{index}].name"
            )
        is_binary = None if output.parameters is None else output.parameters.binary_data
        outputs.append(
            RequestedOutput(output.name, default_binary if is_binary is None else is_binary)
        )
    return outputs


def _elements(tensor: OipInput, raw: bytes) -> Sequence[str | bytes]:
    """The elements of the one input."""
    path = "inputs[0]"
    size = None if tensor.parameters is None else tensor.parameters.binary_data_size
    if size is not None:
        if tensor.data is not None:
            raise InvalidRequestError(
                "must not stand beside the parameter binary_data_size: give one of them",
                f"{path}.data",
            )
        if size != len(raw):
            raise InvalidRequestError(
                f"must be {len(raw)}, the bytes behind the JSON object, not {describe(size)}",
                f"{path}.parameters.binary_data_size",
            )
        elements: Sequence[str | bytes] = split_bytes(raw, f"{path}: the raw data")
    else:
        if raw:
            raise InvalidRequestError(
                f"goes on for {len(raw)} bytes that no input claims with binary_data_size", "body"
            )
        if tensor.data is None:
            raise InvalidRequestError(
                "must be a list of JSON documents as texts, not null", f"{path}.data"
            )
        elements = list(_flattened(tensor.data))
    if tensor.shape not in ([len(elements)], [len(elements), 1]):
        shape = ", ".join(map(describe, tensor.shape))
        raise InvalidRequestError(
            f"must be [{len(elements)}] or [{len(elements)}, 1] for the {len(elements)} elements that are there, not [{shape}]",
            f"{path}.shape",
        )
    if not elements:
        raise InvalidRequestError(
            "must be at least [1]: there is no job to answer for", f"{path}.shape"
        )
    return elements


def _flattened(data: Iterable[str | list[str]]) -> Iterable[str]:
    """The elements as one flat list; the protocol allows nested rows, and a tensor ``[n, 1]`` has
    rows of one element."""
    for element in data:
        if isinstance(element, list):
            yield from element
        else:
            yield element


def _document(text: str | bytes, index: int) -> Any:
    try:
        return parse_json(text)
    except FieldError as error:
        raise located(error, f"{INPUT_NAME}[{index}]") from None
