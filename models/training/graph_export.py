"""Writes networks as ONNX graphs, those that differ in their numbers alone without going through the exporter again.

PyTorch's exporter takes seconds for a graph of seventy nodes, and a report exports a hundred networks of four shapes.  The first
of a shape is exported; its graph then serves as a form in which the numbers of the next are filled in.  A filled-in graph is used
only when it answers as its network does.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

TOLERANCE: Final = 1e-5
"""Largest difference between the answers of a network and of its graph, absolute and relative."""

_MOST_FORMS: Final = 16

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """A graph whose numbers can be exchanged.

    Attributes:
        model: the graph.
        sources: name of each initializer that holds numbers of the network → the name they have there, and whether transposed.
    """

    model: onnx.ModelProto
    sources: dict[str, tuple[str, bool]]

    def filled(self, state: dict[str, NDArray[Any]]) -> bytes:
        """The graph with the numbers of ``state``."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for initializer in model.graph.initializer:
            if initializer.name in self.sources:
                name, is_transposed = self.sources[initializer.name]
                numbers = state[name].T if is_transposed else state[name]
                initializer.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(numbers), initializer.name))
        return bytes(model.SerializeToString())


_forms: dict[Key, _Form] = {}


def export_graph(
    network: nn.Module,
    example: tuple[Tensor, ...],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic_shapes: dict[str, Any],
    key: Key = (),
) -> bytes:
    """``network`` as an ONNX graph, serialised.

    Args:
        network: whose numbers are all in its state.
        example: inputs of the right shapes.
        inputs, outputs: their names.
        dynamic_shapes: as ``torch.onnx.export`` takes them.
        key: what else decides the graph's shape beside the class and the shapes of its state.
    """
    state = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    whole_key = (type(network), key, tuple((name, value.shape, value.dtype.str) for name, value in state.items()))
    form = _forms.get(whole_key)
    if form is not None:
        graph = form.filled(state)
        if _agree(graph, network, example, inputs, outputs):
            return graph
    model = _exported(network, example, inputs, outputs, dynamic_shapes)
    form = _form(model, state)
    if form is not None:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[whole_key] = form
    return bytes(model.SerializeToString())


def _exported(
    network: nn.Module, example: tuple[Tensor, ...], inputs: Sequence[str], outputs: Sequence[str], dynamic_shapes: dict[str, Any]
) -> onnx.ModelProto:
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own use of what torch deprecates
            program = torch.onnx.export(
                network,
                example,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=dynamic_shapes,
                dynamo=True,
                verbose=False,
            )
    finally:
        quiet.setLevel(level)
    assert program is not None
    model = program.model_proto
    for entry in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del entry.metadata_props[:]  # the exporter notes stack traces with the paths of the machine
    return model


def _form(model: onnx.ModelProto, state: dict[str, NDArray[Any]]) -> _Form | None:
    """The graph as a form; ``None`` where the exporter has worked the network's numbers into others."""
    sources: dict[str, tuple[str, bool]] = {}
    for initializer in model.graph.initializer:
        numbers = numpy_helper.to_array(initializer)
        found = _source(initializer.name, numbers, state)
        if found is not None:
            sources[initializer.name] = found
        elif numbers.size > 1 and np.issubdtype(numbers.dtype, np.floating):
            return None
    if {name for name, _ in sources.values()} != state.keys():
        return None
    return _Form(model, sources)


def _source(name: str, numbers: NDArray[Any], state: dict[str, NDArray[Any]]) -> tuple[str, bool] | None:
    if name in state and np.array_equal(numbers, state[name]):
        return name, False
    if numbers.ndim != 2:
        return None
    return next(((own, True) for own, value in state.items() if np.array_equal(numbers, value.T)), None)


def _agree(graph: bytes, network: nn.Module, example: tuple[Tensor, ...], inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    with torch.no_grad():
        wanted = network(*example)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    found = session.run(list(outputs), {name: value.numpy() for name, value in zip(inputs, example, strict=True)})
    return all(
        np.allclose(ours, theirs.numpy(), rtol=TOLERANCE, atol=TOLERANCE) for ours, theirs in zip(found, wanted, strict=True)
    )
