"""The layer kind of a PyTorch module or function, in the vocabulary of :mod:`gpumemnet.job.layers`.

Modules are recognised by their PyTorch base class, so that a subclass counts as what it derives
from; the small norm and drop-path modules that every repository writes anew, by their class name;
functions by their name without underscores, so that ``F.relu``, ``torch.relu_`` and ``Tensor.relu``
are one.  Everything else is looked into, not named: a GELU written out keeps four tensors, the
module keeps one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from gpumemnet.atomic_files import shipped_json
from gpumemnet.job.layers import GROUP_OF_KIND

NOT_A_LAYER: Final = "not_a_layer"
"""Kind of calls that return their input, a view or a copy of it, or no activation."""

LOSS: Final = "loss"
"""Kind of a loss inside a model: part of the training step, not of the network."""


_NAMES_OF_KIND: Final = shipped_json("extract/layer_kinds.json")


def _kinds(part: str) -> dict[str, str]:
    """Name → its kind."""
    return {name: kind for kind, names in _NAMES_OF_KIND[part].items() for name in names}


_TORCH_CLASSES: Final = _kinds("torch_classes")
_OTHER_CLASSES: Final = _kinds("other_classes")
"""Class names, in lower case without underscores, that the field uses for one thing only."""
_ACTIVATION_CLASSES: Final = _kinds("activation_classes")
"""The same for activations that show no function of PyTorch inside: those with a backward pass of
their own."""
_CLASS_ENDINGS: Final = _kinds("class_endings")
"""Ends of such names, as in ``LlamaRMSNorm``."""
_FUNCTIONS: Final = _kinds("functions")
"""Function names without leading and trailing underscores."""


def kind_of_module(module: nn.Module) -> str | None:
    """Return the kind of a module that is one layer; ``None`` for a module to look into."""
    if isinstance(module, torch.jit.ScriptModule):
        return "other"
    is_leaf = next(module.children(), None) is None
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn.") and cls.__name__ in _TORCH_CLASSES:
            kind = _TORCH_CLASSES[cls.__name__]
            # A norm with modules inside is a norm and an activation (timm's BatchNormAct2d): two
            # layers.
            return kind if is_leaf or GROUP_OF_KIND.get(kind) != "norm" else None
    if is_leaf:
        name = type(module).__name__.replace("_", "").lower()
        return _OTHER_CLASSES.get(name) or next(
            (kind for end, kind in _CLASS_ENDINGS.items() if name.endswith(end)), None
        )
    return None


def kind_with_number(kind: str, follows_product: bool) -> str:
    """Return the kind of a sum or product of an activation and a number, which keeps neither.

    Args:
        kind: ``add``, ``multiply``, or any other, which is returned.
        follows_product: whether a matrix product came before it: scores are scaled, and the layer
            list says so.
    """
    return "other" if kind == "add" or (kind == "multiply" and not follows_product) else kind


def kind_of_activation(module: nn.Module) -> str | None:
    """Return the kind of an activation by its class name, for a module in which no function of
    PyTorch is seen."""
    return _ACTIVATION_CLASSES.get(type(module).__name__.replace("_", "").lower())


def kind_of_function(name: str, output_dimensions: int) -> str | None:
    """Return the kind of a PyTorch function by its ``__name__``; ``None`` if it has none.

    Args:
        name: such as ``relu_`` or ``__rsub__``.
        output_dimensions: dimensions of its output, which tell the batch norms apart.
    """
    plain = name.strip("_")
    kind = _FUNCTIONS.get(plain)
    if kind == "batch_norm":
        return f"batch_norm{max(1, min(output_dimensions - 2, 3))}d"
    if kind is None and plain.endswith("_loss"):
        return LOSS
    return kind
