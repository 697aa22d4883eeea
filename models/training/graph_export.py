"""Exports networks as ONNX graphs, and reuses a graph for networks that differ in their weights only.

PyTorch's exporter takes seconds for a graph of seventy nodes, and a report exports a hundred networks of four architectures.
Only the first network of an architecture is exported.  Its graph is the template for the others, which replace the weights.  Such
a graph is used only if its outputs match those of its network.
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
"""Largest absolute and relative difference between the outputs of a network and of its graph."""

_MOST_FORMS: Final = 16

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """A template: a graph whose weights can be replaced.

    Attributes:
        model: the graph.
        sources: name of an initializer → name of the weights in the network's state, and whether they are transposed.
    """

    model: onnx.ModelProto
    sources: dict[str, tuple[str, bool]]

    def filled(self, state: dict[str, NDArray[Any]]) -> bytes:
        """Return the serialised graph with the weights of ``state``."""
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
    """Return ``network`` as a serialised ONNX graph.

    Args:
        network: the network; its state must hold all its weights and constants.
        example: example inputs.
        inputs, outputs: names of the graph's inputs and outputs.
        dynamic_shapes: as in ``torch.onnx.export``.
        key: everything that decides the graph's structure besides the network's class and the shapes of its state.
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
            warnings.simplefilter("ignore")  # the exporter uses deprecated functions of torch
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
        del entry.metadata_props[:]  # the exporter adds stack traces, which hold local paths
    return model


def _form(model: onnx.ModelProto, state: dict[str, NDArray[Any]]) -> _Form | None:
    """Return the graph as a template; ``None`` if the exporter has folded the network's weights into other constants."""
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
