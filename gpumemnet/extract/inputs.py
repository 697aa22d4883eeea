"""A model's inputs: their form on the command line, and meta tensors with the job's batch size.

On the command line an input has no batch dimension: ``3x224x224`` or ``1024:int64``, with ``name=``
first for a keyword argument. Inputs that a factory returns are ``[batch, …]``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.job.layers import MAX_ELEMENTS, describe
from gpumemnet.sandbox.user_code import UnknownValueError

if TYPE_CHECKING:
    from torch import Tensor

DTYPES: Final = (
    *("float32", "float16", "bfloat16", "float64", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_SPEC: Final = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>[0-9]+(?:x[0-9]+)*)(?::(?P<dtype>\w+))?", re.ASCII
)
_DIMENSION_DIGITS: Final = 16
_SHOWN_SHAPES: Final = 4
"""Number of different shapes that an error message lists."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a model.

    Attributes:
        shape: dimensions of one sample, without the batch dimension.
        dtype: one of :data:`DTYPES`.
        name: keyword under which the model takes it, or ``None`` when it is positional.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What the model is called with: meta tensors, tensors that keep their values, and other
    arguments of the factory, unchanged.

    Attributes:
        args, kwargs: arguments of the call.
        batch_size: samples in the batch, the first dimension of the tensors.
        note: what was done to inputs of another batch size, or an empty text.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int
    note: str = ""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [tensor for _, tensor in _named_tensors((*self.args, self.kwargs))]

    def shapes_of_fault(self, fault: BaseException) -> str:
        """Return the shapes as the end of the sentence about ``fault``, such as ``; inputs: 8x128
        (2 times), 8``.

        They say nothing about code that needs values.
        """
        if isinstance(fault, UnknownValueError):
            return ""
        times = Counter("x".join(map(str, tensor.shape)) or "()" for tensor in self.tensors)
        texts = [
            shape if count == 1 else f"{shape} ({count} times)" for shape, count in times.items()
        ]
        others = f" and {len(texts) - _SHOWN_SHAPES} others" if len(texts) > _SHOWN_SHAPES else ""
        return f"; inputs: {', '.join(texts[:_SHOWN_SHAPES])}{others}"

    @property
    def elements_per_sample(self) -> int:
        """Number of elements of all inputs per sample, at least 1."""
        return max(1, round(sum(tensor.numel() for tensor in self.tensors) / self.batch_size))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return the inputs with ``change`` applied to every tensor."""
        from gpumemnet.extract.module_calls import map_tensors

        return ModelInputs(
            tuple(map_tensors(value, change) for value in self.args),
            {name: map_tensors(value, change) for name, value in self.kwargs.items()},
            self.batch_size,
            self.note,
        )

    def resized(self, batch_size: int) -> ModelInputs:
        """Return the inputs with ``batch_size`` samples; tensors without a batch dimension are
        unchanged."""
        import torch

        if batch_size == self.batch_size:
            return self

        def resize(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or tensor.shape[0] != self.batch_size:
                return tensor
            if not tensor.is_meta:  # values that models read: further samples repeat them
                return tensor[torch.arange(batch_size) % self.batch_size]
            return tensor.new_empty((batch_size, *tensor.shape[1:]))

        return replace(self.mapped(resize), batch_size=batch_size)


def parse_input(text: str) -> InputSpec:
    """Parse an input of the form ``[name=]D1xD2x…[:dtype]``.

    Raises:
        InvalidRequestError: shows the form, or lists the dtypes.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise InvalidRequestError(
            f"must look like 3x224x224, 1024:int64 or mask=128:bool (no batch dimension), not {describe(text)}",
            "input",
        )
    dimensions = match["shape"].split("x")
    shape = tuple(int(d) if len(d) <= _DIMENSION_DIGITS else MAX_ELEMENTS + 1 for d in dimensions)
    if 0 in shape or math.prod(shape) > MAX_ELEMENTS:
        raise InvalidRequestError(
            f"must have dimensions above 0 and at most 2**50 elements, not {describe(text)}",
            "input",
        )
    dtype = match["dtype"] or "float32"
    if dtype not in DTYPES:
        raise InvalidRequestError(
            f"must have a dtype of {', '.join(DTYPES)}, not {describe(dtype)}", "input"
        )
    return InputSpec(shape, dtype, match["name"])


def inputs_from_specs(
    specs: Sequence[InputSpec], batch_size: int, keep_values: bool = False
) -> ModelInputs:
    """Return meta tensors ``[batch_size, *shape]`` for ``specs``.

    With ``keep_values``, inputs of whole numbers are ones, as a mask of unpadded samples is.
    """
    import torch

    tensors = [
        torch.empty(batch_size, *s.shape, dtype=getattr(torch, s.dtype), device="meta")
        for s in specs
    ]
    if keep_values:
        tensors = [torch.ones(t.shape, dtype=t.dtype) if _keeps_values(t) else t for t in tensors]
    args = tuple(tensor for spec, tensor in zip(specs, tensors, strict=True) if spec.name is None)
    kwargs = {
        spec.name: tensor
        for spec, tensor in zip(specs, tensors, strict=True)
        if spec.name is not None
    }
    return ModelInputs(args, kwargs, batch_size)


def as_model_inputs(inputs: object, batch_size: int | None) -> ModelInputs:
    """Return what a user calls a model with, as :class:`ModelInputs`; those that are already stay
    as they are.

    Args:
        inputs, batch_size: see :func:`inputs_from_example`.

    Raises:
        ExtractError, InvalidRequestError: as :func:`inputs_from_example`.
    """
    return (
        inputs
        if isinstance(inputs, ModelInputs)
        else inputs_from_example(inputs, batch_size, keep_values=True)
    )


def inputs_from_example(
    example: object, batch_size: int | None, keep_values: bool = False
) -> ModelInputs:
    """Return meta tensors with the shapes of ``example``.

    The first dimension of the first tensor is the batch size.  For another ``batch_size``, every
    tensor whose first dimension equals the example's batch size is resized; the others are
    unchanged, and the note lists both.

    Args:
        example: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        batch_size: samples per batch; that of the example by default.
        keep_values: whether small tensors of whole numbers, such as masks, keep the values of the
            example; models read them. Further samples repeat those of the example.

    Raises:
        ExtractError: the example holds no tensor with a batch dimension.
    """
    import torch

    kwargs = dict(example) if isinstance(example, Mapping) else {}
    args: tuple[Any, ...] = (
        () if kwargs else tuple(example) if isinstance(example, tuple | list) else (example,)
    )
    named = [(name, tensor) for name, tensor in _named_tensors(kwargs or args) if tensor.ndim > 0]
    if not named:
        raise ExtractError(
            "inputs: no tensor has a batch dimension; give a tensor, a tuple of tensors or a dict of keyword tensors"
        )
    example_batch = named[0][1].shape[0]
    if example_batch == 0:
        raise ExtractError("inputs: the batch is empty; the first dimension must be at least 1")
    wanted = example_batch if batch_size is None else batch_size

    def to_meta(tensor: Tensor) -> Tensor:
        batched = tensor.ndim > 0 and tensor.shape[0] == example_batch
        shape = (wanted, *tensor.shape[1:]) if batched else tuple(tensor.shape)
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        if not keep_values or tensor.is_meta or not _keeps_values(meta):
            return meta
        return tensor.cpu()[torch.arange(wanted) % example_batch] if batched else tensor.cpu()

    note = ""
    if wanted != example_batch:
        grown = ", ".join(name for name, tensor in named if tensor.shape[0] == example_batch)
        kept = ", ".join(name for name, tensor in named if tensor.shape[0] != example_batch)
        note = f"The factory's inputs hold {example_batch} samples; at batch size {wanted}, resized: {grown}"
        note += f"; kept as they are: {kept}." if kept else "."
    return ModelInputs(args, kwargs, wanted, note).mapped(to_meta)


def _keeps_values(tensor: Tensor) -> bool:
    """Whether an input is small and of whole numbers: positions, token numbers, masks."""
    from gpumemnet.extract.placement import is_small

    return not (tensor.is_floating_point() or tensor.is_complex()) and is_small(tensor)


def _named_tensors(value: object, name: str = "") -> list[tuple[str, Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        return [(name or "input", value)]
    items: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        items = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, tuple | list):
        items = [(f"input {index}", entry) for index, entry in enumerate(value)]
    return [pair for key, entry in items for pair in _named_tensors(entry, f"{name} {key}".strip())]
