"""Reads an inference request: the jobs, how the answer is wanted, and which outputs in which form.

The envelope is the protocol's ``$inference_request``; the jobs in it are read by :mod:`gpumemnet.job.json_codec`, the one
parser of
jobs.  What this service does not know is refused and never passed over: a misspelt ``coverage`` would change the limit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import FieldError, InvalidJobError, InvalidRequestError
from gpumemnet.job.json_codec import job_from_json, parse_json
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bins import BinScheme, bins_of_width
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB

from ..api.problems import located
from ..api.requests import MAX_BIN_WIDTH_MIB, MIN_BIN_WIDTH_MIB
from ..middleware.limits import MAX_PROBABILITIES
from .outputs import OUTPUT_NAMES
from .tensors import split_bytes

INPUT_NAME: Final = "job"
INPUT_DATATYPE: Final = "BYTES"
DEFAULT_BIN_WIDTH_MIB: Final = 1024
"""Bins reach to 192 GiB whatever GPU a row is for: a tensor has the same columns in all rows."""

MEMBERS: Final = ("inputs", "outputs", "parameters", "id", "model_name", "model_version")
"""KServe's client repeats the model of the path in the body; the path decides."""
PARAMETERS: Final = ("coverage", "bin_width_mib", "gpu", "encoder")
_OTHER_PARAMETERS: Final = ("binary_data_output", "priority", "timeout", "content_type", "headers")
"""Those of other servers' extensions that leave the answer as it is."""


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output, and whether it is wanted in raw form."""

    name: str
    is_binary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """What is asked.

    Attributes:
        id: the client's name for the request, which the answer repeats.
        jobs: at least one.
        coverage: share of jobs that the limits shall cover; not checked yet.
        bins: bin scheme of the probabilities.
        gpu, encoder: as :meth:`gpumemnet.predict.predictor.Predictor.predict` takes them.
        outputs: what is wanted, in this order.
    """

    id: str | None
    jobs: Sequence[TrainingJob]
    coverage: Any
    bins: BinScheme
    gpu: str | None
    encoder: str | None
    outputs: Sequence[RequestedOutput]


def read_infer_request(body: bytes, header_length: bytes | None, max_jobs: int, max_layers: int) -> InferRequest:
    """The request in ``body``.

    Args:
        body: a JSON object, and behind it the raw form of the inputs that say so.
        header_length: the header ``Inference-Header-Content-Length``: bytes of the JSON object, where others follow it.
        max_jobs: most jobs.
        max_layers: most layers of a job.

    Raises:
        InvalidRequestError, InvalidJobError: with the place of the fault as seen from the body.
    """
    length = _header_length(header_length, len(body))
    document = _object(_parsed(body[:length]), "body", MEMBERS)
    parameters = _parameters(document, "", (*PARAMETERS, *_OTHER_PARAMETERS))
    outputs = _outputs(document.get("outputs"), _truth(parameters, "binary_data_output", "parameters"))
    texts = _elements(document, body[length:])
    if len(texts) > max_jobs:
        raise InvalidRequestError(f"must hold at most {max_jobs} jobs, not {len(texts)}: send several requests", INPUT_NAME)
    bins = _bins(_given(parameters, "bin_width_mib", DEFAULT_BIN_WIDTH_MIB))
    if len(texts) * bins.count > MAX_PROBABILITIES and any(output.name == "probabilities" for output in outputs):
        raise InvalidRequestError(
            f"gives {bins.count} bins for each of {len(texts)} jobs, and an answer holds at most {MAX_PROBABILITIES} "
            "probabilities: ask for wider bins, for fewer jobs, or for other outputs",
            "parameters.bin_width_mib",
        )
    return InferRequest(
        id=_id(document.get("id")),
        jobs=[_job(text, index, max_layers) for index, text in enumerate(texts)],
        coverage=_given(parameters, "coverage", DEFAULT_COVERAGE),
        bins=bins,
        gpu=_word(parameters, "gpu"),
        encoder=_word(parameters, "encoder"),
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


def _parsed(text: bytes) -> Any:
    try:
        return parse_json(text)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None


def _object(value: Any, place: str, known: Sequence[str]) -> Mapping[str, Any]:
    """``value`` if it is an object of known members."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"must be an object, not {describe(value)}", place)
    for name in value:
        if name not in known:
            close = difflib.get_close_matches(name[:64], known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known here are {', '.join(known)}"
            raise InvalidRequestError(f"does not know {describe(name)}: {hint}", place)
    return value


def _parameters(document: Mapping[str, Any], place: str, known: Sequence[str]) -> Mapping[str, Any]:
    value = document.get("parameters")
    return {} if value is None else _object(value, f"{place}parameters", known)


def _id(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _is_encodable(value):
        raise InvalidRequestError(f"must be a text, not {describe(value)}", "id")
    return value


def _is_encodable(text: str) -> bool:
    """Whether UTF-8 can carry ``text``: JSON's escapes can smuggle lone surrogates in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _given(parameters: Mapping[str, Any], name: str, default: Any) -> Any:
    value = parameters.get(name)
    return default if value is None else value


def _word(parameters: Mapping[str, Any], name: str) -> str | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"must be a text, not {describe(value)}", f"parameters.{name}")
    return value


def _truth(parameters: Mapping[str, Any], name: str, place: str, default: bool = False) -> bool:
    value = _given(parameters, name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"must be true or false, not {describe(value)}", f"{place}.{name}")
    return value


def _bins(width_mib: Any) -> BinScheme:
    if type(width_mib) is not int or not MIN_BIN_WIDTH_MIB <= width_mib <= MAX_BIN_WIDTH_MIB:
        raise InvalidRequestError(
            f"must be a whole number of MiB between {MIN_BIN_WIDTH_MIB} and {MAX_BIN_WIDTH_MIB}, not {describe(width_mib)}",
            "parameters.bin_width_mib",
        )
    return bins_of_width(width_mib * MIB)


def _outputs(value: Any, default_binary: bool) -> Sequence[RequestedOutput]:
    if value is None or value == []:  # the protocol: all outputs of the model
        return [RequestedOutput(name, default_binary) for name in OUTPUT_NAMES]
    if not isinstance(value, list):
        raise InvalidRequestError(f"must be a list, not {describe(value)}", "outputs")
    outputs: list[RequestedOutput] = []
    for index, entry in enumerate(value):
        place = f"outputs[{index}]"
        document = _object(entry, place, ("name", "parameters"))
        name = document.get("name")
        if name not in OUTPUT_NAMES:
            raise InvalidRequestError(f"must be one of {', '.join(OUTPUT_NAMES)}, not {describe(name)}", f"{place}.name")
        if any(output.name == name for output in outputs):
            raise InvalidRequestError(f"is asked for twice: {name}", f"{place}.name")
        parameters = _parameters(document, f"{place}.", ("binary_data",))
        outputs.append(RequestedOutput(name, _truth(parameters, "binary_data", f"{place}.parameters", default_binary)))
    return outputs


def _elements(document: Mapping[str, Any], raw: bytes) -> Sequence[str | bytes]:
    """The elements of the one input."""
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1:
        what = f"{len(inputs)} inputs" if isinstance(inputs, list) else describe(inputs)
        raise InvalidRequestError(f"must be a list of one input, the tensor {INPUT_NAME}, not {what}", "inputs")
    place = "inputs[0]"
    tensor = _object(inputs[0], place, ("name", "shape", "datatype", "data", "parameters"))
    for member, wanted in (("name", INPUT_NAME), ("datatype", INPUT_DATATYPE)):
        if tensor.get(member) != wanted:
            raise InvalidRequestError(f"must be {wanted}, not {describe(tensor.get(member))}", f"{place}.{member}")
    parameters = _parameters(tensor, f"{place}.", ("binary_data_size", "content_type"))
    if _given(parameters, "content_type", "str") != "str":
        raise InvalidRequestError(f"must be str, not {describe(parameters['content_type'])}", f"{place}.parameters.content_type")
    if parameters.get("binary_data_size") is not None:
        if tensor.get("data") is not None:
            raise InvalidRequestError("must not stand beside the parameter binary_data_size: give one of them", f"{place}.data")
        _check_raw_size(parameters["binary_data_size"], len(raw), f"{place}.parameters.binary_data_size")
        elements: Sequence[str | bytes] = split_bytes(raw, f"{place}: the raw data")
    else:
        if raw:
            raise InvalidRequestError(f"goes on for {len(raw)} bytes that no input claims with binary_data_size", "body")
        elements = _texts(tensor.get("data"), f"{place}.data")
    _check_shape(tensor.get("shape"), len(elements), f"{place}.shape")
    return elements


def _check_raw_size(size: Any, there: int, place: str) -> None:
    if type(size) is not int or size != there:
        raise InvalidRequestError(f"must be {there}, the bytes behind the JSON object, not {describe(size)}", place)


def _texts(data: Any, place: str) -> Sequence[str]:
    if not isinstance(data, list):
        raise InvalidRequestError(f"must be a list of JSON documents as texts, not {describe(data)}", place)
    texts = list(_flattened(data))
    for text in texts:
        if not isinstance(text, str):
            raise InvalidRequestError(f"must hold texts, each the JSON document of a job, not {describe(text)}", place)
    return texts


def _flattened(data: Iterable[Any]) -> Iterable[Any]:
    """The protocol allows rows nested or one after the other; a tensor ``[n, 1]`` has rows of one."""
    for element in data:
        if isinstance(element, list):
            yield from element
        else:
            yield element


def _check_shape(shape: Any, count: int, place: str) -> None:
    if not isinstance(shape, list) or not all(type(size) is int for size in shape) or shape not in ([count], [count, 1]):
        told = ", ".join(map(describe, shape[:4])) if isinstance(shape, list) else describe(shape)
        raise InvalidRequestError(
            f"must be [{count}] or [{count}, 1] for the {count} elements that are there, not [{told}]", place
        )
    if count == 0:
        raise InvalidRequestError("must be at least [1]: there is no job to answer for", place)


def _job(text: str | bytes, index: int, max_layers: int) -> TrainingJob:
    try:
        job = job_from_json(text)
        if len(job.layers) > max_layers:
            raise InvalidJobError(f"must hold at most {max_layers} layers, not {len(job.layers)}", "layers")
        return job
    except FieldError as error:
        raise located(error, f"{INPUT_NAME}[{index}]") from None
