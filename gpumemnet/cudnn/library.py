"""cuDNN's C interface for execution plans of convolutions on a described device; only the child
process that runs :func:`answer_questions` loads it.

Each step follows ``aten/src/ATen/native/cudnn/Conv_v8.cpp``: tensors, convolution, operation graph,
heuristics.  A description of the device takes the place of a cuDNN handle.  Numbers are those of
``cudnn_graph_v9.h``.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import from_json
from gpumemnet.cudnn.execution_plans import (
    ALIGNMENT_BYTES,
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    NOTES,
    ConvolutionQuestion,
    ExecutionPlan,
    ExecutionPlans,
)

_DATA_TYPES: Final = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_COMPUTE_TYPES: Final = {"float64": 1}
"""All other types are accumulated in fp32, which is 0."""

# cudnnBackendDescriptorType_t
_CONVOLUTION, _ENGINE, _ENGINE_CONFIG, _HEURISTICS, _PLAN, _GRAPH, _TENSOR, _DEVICE = (
    1,
    2,
    3,
    4,
    5,
    15,
    17,
    38,
)
_OPERATIONS: Final = {
    FORWARD: (10, range(700, 706)),
    BACKWARD_DATA: (12, range(706, 712)),
    BACKWARD_FILTER: (11, range(712, 718)),
}
"""Operation → its descriptor, and its attributes: alpha, beta, convolution, weight, image,
result."""
# cudnnBackendAttributeType_t
_OF_DATA_TYPE, _OF_INT64, _OF_FLOAT, _OF_CONVOLUTION_MODE, _OF_HEURISTICS_MODE = (
    1,
    3,
    4,
    7,
    8,
)
_OF_NOTE, _OF_DESCRIPTOR, _OF_CHAR = 11, 15, 24
# cudnnBackendAttributeName_t
_COMPUTE_TYPE, _MODE, _DILATIONS, _STRIDES, _POST_PADDINGS, _PRE_PADDINGS, _DIMENSIONS = range(
    100, 107
)
_HEURISTICS_MODE, _HEURISTICS_GRAPH, _HEURISTICS_RESULTS, _HEURISTICS_DEVICE = 200, 201, 202, 204
_CONFIG_ENGINE, _PLAN_CONFIG, _PLAN_WORKSPACE, _PLAN_DEVICE, _GRAPH_OPERATIONS = (
    300,
    401,
    402,
    407,
    801,
)
_TENSOR_ALIGNMENT, _TENSOR_TYPE, _TENSOR_SHAPE, _TENSOR_STRIDES, _TENSOR_ID = (
    900,
    901,
    902,
    903,
    906,
)
_ENGINE_INDEX, _ENGINE_NOTES, _DEVICE_JSON = 1301, 1303, 2702
_CROSS_CORRELATION: Final = 1
_INSTANT, _FALLBACK = 0, 2
_MAX_NOTES: Final = 32
_ANSWER_SECONDS: Final = 60

DRIVER_NAME: Final = "libcuda.so.1"
DRIVER_FUNCTIONS: Final = (
    *("cuGetErrorString", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    *("cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"),
)
"""cuDNN's run-time compiled engines are linked to these functions of the CUDA driver.  To list
plans, cuDNN needs them to be there and to return 0."""


class BackendError(Exception):
    """cuDNN refused a call."""


class Backend:
    """The library, with the devices that were described to it.

    Args:
        library: the file ``libcudnn.so.9``.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        self._library.cudnnGetErrorString.restype = ctypes.c_char_p
        self._devices: dict[str, _Descriptor] = {}

    @property
    def version(self) -> int:
        """Version as one number: 92800 is 9.28.0."""
        return int(self._library.cudnnGetVersion())

    def plans(self, device: Mapping[str, Any], question: ConvolutionQuestion) -> ExecutionPlans:
        """Return the plans that are supported on ``device``.

        Raises:
            BackendError: cuDNN does not accept the device or the convolution.
        """
        key = json.dumps(device)
        if key not in self._devices:
            text = key.encode()
            described = self._new(_DEVICE)
            described.set(_DEVICE_JSON, _OF_CHAR, ctypes.create_string_buffer(text), len(text))
            self._devices[key] = described.finished()
        described = self._devices[key]
        graph, kept = self._graph(question)
        plans = ExecutionPlans(
            self._plans_in_mode(graph, described, _INSTANT),
            self._plans_in_mode(graph, described, _FALLBACK),
        )
        del kept
        return plans

    def _new(self, kind: int) -> _Descriptor:
        return _Descriptor(self._library, kind)

    def _graph(self, question: ConvolutionQuestion) -> tuple[_Descriptor, list[_Descriptor]]:
        """Return the operation graph, and the descriptors that it refers to."""
        convolution = self._new(_CONVOLUTION)
        convolution.set_enum(_COMPUTE_TYPE, _OF_DATA_TYPE, _COMPUTE_TYPES.get(question.dtype, 0))
        convolution.set_enum(_MODE, _OF_CONVOLUTION_MODE, _CROSS_CORRELATION)
        convolution.set_numbers(_DIMENSIONS, [len(question.stride)])
        convolution.set_numbers(_PRE_PADDINGS, question.padding)
        convolution.set_numbers(_POST_PADDINGS, question.padding)
        convolution.set_numbers(_STRIDES, question.stride)
        convolution.set_numbers(_DILATIONS, question.dilation)
        convolution.finished()
        tensors = [
            self._tensor(name, shape, question)
            for name, shape in (
                ("w", question.weight),
                ("x", question.image),
                ("y", question.result),
            )
        ]
        kind, (alpha, beta, *attributes) = _OPERATIONS[question.operation]
        operation = self._new(kind)
        for attribute, descriptor in zip(attributes, (convolution, *tensors), strict=True):
            operation.set_descriptors(attribute, [descriptor])
        operation.set(alpha, _OF_FLOAT, ctypes.byref(ctypes.c_float(1)), 1)
        operation.set(beta, _OF_FLOAT, ctypes.byref(ctypes.c_float(0)), 1)
        operation.finished()
        graph = self._new(_GRAPH)
        graph.set_descriptors(_GRAPH_OPERATIONS, [operation])
        return graph.finished(), [convolution, *tensors, operation]

    def _tensor(
        self, name: str, shape: Sequence[int], question: ConvolutionQuestion
    ) -> _Descriptor:
        tensor = self._new(_TENSOR)
        tensor.set_enum(_TENSOR_TYPE, _OF_DATA_TYPE, _DATA_TYPES[question.dtype])
        tensor.set_numbers(_TENSOR_SHAPE, shape)
        tensor.set_numbers(_TENSOR_STRIDES, strides(shape, question.channels_last))
        tensor.set_numbers(_TENSOR_ID, [ord(name)])
        tensor.set_numbers(_TENSOR_ALIGNMENT, [ALIGNMENT_BYTES])
        return tensor.finished()

    def _plans_in_mode(
        self, graph: _Descriptor, device: _Descriptor, mode: int
    ) -> tuple[ExecutionPlan, ...]:
        """Return the plans that the heuristics name in this mode; a configuration that cannot be
        planned is left out."""
        heuristics = self._new(_HEURISTICS)
        heuristics.set_descriptors(_HEURISTICS_GRAPH, [graph])
        heuristics.set_enum(_HEURISTICS_MODE, _OF_HEURISTICS_MODE, mode)
        heuristics.set_descriptors(_HEURISTICS_DEVICE, [device])
        try:
            heuristics.finished()
        except BackendError:
            return ()
        plans = []
        for config in heuristics.descriptors(_HEURISTICS_RESULTS, _ENGINE_CONFIG):
            try:
                plans.append(self._plan(config, device))
            except BackendError:
                continue
        return tuple(plans)

    def _plan(self, config: _Descriptor, device: _Descriptor) -> ExecutionPlan:
        (engine,) = config.descriptors(_CONFIG_ENGINE, _ENGINE, 1)
        plan = self._new(_PLAN)
        plan.set_descriptors(_PLAN_CONFIG, [config])
        plan.set_descriptors(_PLAN_DEVICE, [device])
        plan.finished()
        notes = engine.numbers(_ENGINE_NOTES, _OF_NOTE, ctypes.c_int, _MAX_NOTES)
        return ExecutionPlan(
            engine.numbers(_ENGINE_INDEX, _OF_INT64, ctypes.c_int64, 1)[0],
            plan.numbers(_PLAN_WORKSPACE, _OF_INT64, ctypes.c_int64, 1)[0],
            tuple(NOTES[note] for note in notes if note in NOTES),
        )


class _Descriptor:
    """A descriptor of cuDNN; it is destroyed with this object."""

    def __init__(self, library: ctypes.CDLL, kind: int) -> None:
        self._library = library
        self._pointer = ctypes.c_void_p()
        self._check(library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self._pointer)))

    def __del__(self) -> None:
        self._library.cudnnBackendDestroyDescriptor(self._pointer)

    def set(self, attribute: int, kind: int, values: Any, count: int) -> None:
        self._check(
            self._library.cudnnBackendSetAttribute(
                self._pointer, attribute, kind, ctypes.c_int64(count), values
            )
        )

    def set_enum(self, attribute: int, kind: int, value: int) -> None:
        self.set(attribute, kind, ctypes.byref(ctypes.c_int(value)), 1)

    def set_numbers(self, attribute: int, values: Sequence[int]) -> None:
        self.set(attribute, _OF_INT64, (ctypes.c_int64 * len(values))(*values), len(values))

    def set_descriptors(self, attribute: int, descriptors: Sequence[_Descriptor]) -> None:
        pointers = (ctypes.c_void_p * len(descriptors))(
            *(each._pointer.value for each in descriptors)
        )
        self.set(attribute, _OF_DESCRIPTOR, pointers, len(descriptors))

    def finished(self) -> _Descriptor:
        self._check(self._library.cudnnBackendFinalize(self._pointer))
        return self

    def numbers(self, attribute: int, kind: int, of: Any, most: int) -> list[int]:
        values, count = (of * most)(), ctypes.c_int64()
        self._get(attribute, kind, most, count, values)
        return list(values[: count.value])

    def descriptors(self, attribute: int, kind: int, most: int | None = None) -> list[_Descriptor]:
        count = ctypes.c_int64(most or 0)
        if most is None:
            self._get(attribute, _OF_DESCRIPTOR, 0, count, None)
        descriptors = [_Descriptor(self._library, kind) for _ in range(count.value)]
        pointers = (ctypes.c_void_p * len(descriptors))(
            *(each._pointer.value for each in descriptors)
        )
        found = ctypes.c_int64()
        self._get(attribute, _OF_DESCRIPTOR, len(descriptors), found, pointers)
        return descriptors[: found.value]

    def _get(
        self, attribute: int, kind: int, most: int, count: ctypes.c_int64, values: Any
    ) -> None:
        get = self._library.cudnnBackendGetAttribute
        self._check(
            get(self._pointer, attribute, kind, ctypes.c_int64(most), ctypes.byref(count), values)
        )

    def _check(self, status: int) -> None:
        if status:
            raise BackendError(self._library.cudnnGetErrorString(status).decode())


def strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Return the strides of a dense tensor ``[batch, channels, *spatial]``."""
    order = [0, *range(2, len(shape)), 1] if channels_last else list(range(len(shape)))
    found = [1] * len(shape)
    for inner, outer in pairwise(reversed(order)):
        found[outer] = found[inner] * shape[inner]
    return tuple(found)


def load_driver_stand_in() -> None:
    """Load a library in place of the CUDA driver's into this process; libraries loaded later that
    need ``libcuda.so.1`` get it.

    Raises:
        OSError: there is no C compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("a C compiler is needed: install gcc or clang")
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in DRIVER_FUNCTIONS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, DRIVER_NAME)
        build = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{DRIVER_NAME}", "-o", str(file)]
        built = subprocess.run(
            [*build, "-x", "c", "-"], input=source, capture_output=True, text=True, check=False
        )
        if built.returncode:
            raise OSError(f"{compiler} failed: {built.stderr.strip()}")
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def answer_questions(library: str) -> None:
    """Answer questions until the input ends; the child process does.

    It writes one line with the version of the library.  Then it answers each line on its standard
    input, a JSON object with a ``device`` and a ``question``, with one line: plans, or an
    ``error``.
    """
    signal.alarm(_ANSWER_SECONDS)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what cuDNN prints must not mix with the answers
    try:
        load_driver_stand_in()
        backend = Backend(Path(library))
    except OSError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return
    answers.write(json.dumps({"version": backend.version}) + "\n")
    signal.alarm(0)
    for line in sys.stdin:
        signal.alarm(_ANSWER_SECONDS)
        request = json.loads(line)
        try:
            question = from_json(ConvolutionQuestion, request["question"])
            answer = asdict(backend.plans(request["device"], question))
        except BackendError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        signal.alarm(0)
