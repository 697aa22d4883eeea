"""Exports networks as ONNX graphs, and reuses a graph for networks that differ in their weights
only.

PyTorch's exporter takes seconds for a graph of seventy nodes, and a report exports a hundred
networks of four architectures. Only the first network of an architecture is exported.  Its graph is
the template for the others, which replace the weights.  Such a graph is used only if its outputs
match those of its network.
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

_MAX_TEMPLATES: Final = 16

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Template:
    """A template: a graph whose weights can be replaced.

    Attributes:
        model: the graph.
        sources: name of an initializer → name of the weights in the network's state, and whether
            they are transposed.
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
                initializer.CopyFrom(
                    numpy_helper.from_array(np.ascontiguousarray(numbers), initializer.name)
                )
        return bytes(model.SerializeToString())


_templates: dict[Key, _Template] = {}


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
        key: everything that decides the graph's structure besides the network's class and the
            shapes of its state.
    """
    state = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    whole_key = (
        type(network),
        key,
        tuple((name, value.shape, value.dtype.str) for name, value in state.items()),
    )
    template = _templates.get(whole_key)
    if template is not None:
        graph = template.filled(state)
        if _outputs_agree(graph, network, example, inputs, outputs):
            return graph
    model = _run_exporter(network, example, inputs, outputs, dynamic_shapes)
    template = _template(model, state)
    if template is not None:
        if len(_templates) >= _MAX_TEMPLATES:
            _templates.clear()
        _templates[whole_key] = template
    return bytes(model.SerializeToString())


def _run_exporter(
    network: nn.Module,
    example: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    dynamic_shapes: dict[str, Any],
) -> onnx.ModelProto:
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
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
        exporter_log.setLevel(level)
    assert program is not None
    model = program.model_proto
    for entry in (
        model,
        model.graph,
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
    ):
        del entry.metadata_props[:]  # the exporter adds stack traces, which hold local paths
    return model


def _template(model: onnx.ModelProto, state: dict[str, NDArray[Any]]) -> _Template | None:
    """Return the graph as a template; ``None`` if the exporter has folded the network's weights
    into other constants."""
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
    return _Template(model, sources)


def _source(
    name: str, numbers: NDArray[Any], state: dict[str, NDArray[Any]]
) -> tuple[str, bool] | None:
    if name in state and np.array_equal(numbers, state[name]):
        return name, False
    if numbers.ndim != 2:
        return None
    return next(
        ((own, True) for own, value in state.items() if np.array_equal(numbers, value.T)), None
    )


def _outputs_agree(
    graph: bytes,
    network: nn.Module,
    example: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> bool:
    with torch.no_grad():
        network_outputs = network(*example)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    graph_outputs = session.run(
        list(outputs), {name: value.numpy() for name, value in zip(inputs, example, strict=True)}
    )
    return all(
        np.allclose(graph_output, network_output.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
        for graph_output, network_output in zip(graph_outputs, network_outputs, strict=True)
    )
