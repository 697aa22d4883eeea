"""Code that needs the values of tensors, which a trace does not compute, goes on with a guess.

Each guess is a note that names the operator and the line.  There are four guesses.  A value that is
read is 1.  A condition is true, unless it leads to an error.  An operator that selects elements by their values selects all of
them.  An operator that is not PyTorch's own and does not describe its output returns a tensor like
its first argument.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import gpumemnet
from gpumemnet.extract.known_layouts import meta_like
from gpumemnet.extract.placement import NEEDS_VALUES, READS_VALUE_BELOW, MissingValues, one
from gpumemnet.sandbox.user_code import UnknownValueError, is_user_code, running_frame
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import (
    Arguments,
    Keywords,
    aten,
    least_sized,
    schema,
    tree_leaves,
)
from gpumemnet.tracing.script.branches import Place, place_of

_Guessed = tuple[Any, str]
"""The result of an operator, and in words what it was taken to be."""
_CONDITIONS: Final = frozenset({"__bool__", "__contains__"})
_ARRAYS: Final = frozenset({"tolist", "numpy", "__array__"})
_MAX_VALUES: Final = 2**24
"""Largest number of values that are made up for one tensor, in host memory."""
_MAX_TIMES: Final = 10_000
"""How often one line may ask for a condition: it may be a loop that waits for another value."""


_BETWEEN: Final = (*gpumemnet.__path__, *names.WRAPPER_FILES, *names.METHOD_FILES)
"""Files that stand between the code that reads a value and :class:`ReadValues`."""


def running_place() -> Place | None:
    """Return the place in the script or in a library of models that reads a value; ``None`` in
    PyTorch itself, and in libraries without it: they allocate nothing, whatever way they go."""
    frame = running_frame(lambda file: file.startswith(_BETWEEN))
    if frame is None or frame.f_code.co_filename.startswith(names.TORCH_FOLDER):
        return None
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    is_own = is_user_code(frame.f_code.co_filename)
    return place_of(frame) if is_own or _uses_torch(package) else None


@cache
def _uses_torch(package: str) -> bool:
    return any(
        name.partition(".")[0] == package and getattr(module, "__dict__", {}).get("torch") is torch
        for name, module in list(sys.modules.items())
    )


class GuessedValues(MissingValues):
    """Continues with a guess where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self._conditions: Counter[str] = Counter()

    def value(self, function: str, tensor: Tensor) -> Any:
        """Return true, an array of ones, or 1."""
        kind = function.rpartition(".")[2]
        if self._scalars_are_factors and kind == "item":
            return one(tensor.dtype)
        if kind in _CONDITIONS:
            place = running_place()
            taken = place is None or place.repeats or not place.is_settled or bool(place.usual)
            where = self._note(function, f"was taken to be {str(taken).lower()}")
            self._conditions[where] += 1
            if self._conditions[where] > _MAX_TIMES:
                raise UnknownValueError(
                    function,
                    f"was taken to be {str(taken).lower()} {_MAX_TIMES:,} times, and the code does not end",
                )
            return taken
        if kind in _ARRAYS:
            if tensor.numel() > _MAX_VALUES:
                raise UnknownValueError(function, NEEDS_VALUES)
            self._note(function, f"was taken to give {tensor.numel():,} ones")
            kind_of = "float32" if tensor.dtype == torch.bfloat16 else str(tensor.dtype)
            ones = np.ones(tensor.shape, np.dtype(kind_of.removeprefix("torch.")))
            return ones.tolist() if kind == "tolist" else ones
        self._note(function, "was taken to be 1")
        return {"__int__": 1, "__index__": 1, "__float__": 1.0, "__complex__": 1 + 0j}.get(
            kind, one(tensor.dtype)
        )

    def result(
        self, operator: Any, args: Arguments, kwargs: Keywords, error: UnknownValueError
    ) -> Any:
        """Return an output of the largest possible shape.

        Raises:
            UnknownValueError: ``error``, if that shape is unknown.
        """
        guess = guess_of(operator, args, kwargs)
        if guess is None:
            raise error
        result, what = guess(*args, **kwargs)
        self._note(error.operator, what)
        return result


_Guess = Callable[..., _Guessed]
"""Called with the operator's arguments; returns its output, and the guess in words."""


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _true(*tensors: Any) -> _Guessed:
    return True, "was taken to be true"


def _nonzero(tensor: Tensor, *, share: float = 1) -> _Guessed:
    return _empty(
        _part(tensor.numel(), share), tensor.ndim
    ), f"was taken to find {_of(tensor.numel(), share)} elements"


def _masked_select(tensor: Tensor, mask: Tensor, *, share: float = 1) -> _Guessed:
    elements = torch.broadcast_shapes(tensor.shape, mask.shape).numel()  # type: ignore[no-untyped-call]
    kept = _empty(_part(elements, share), dtype=tensor.dtype)
    return kept, f"was taken to keep {_of(elements, share)} elements"


def _indexed(tensor: Tensor, indices: Sequence[Tensor | None], *, share: float = 1) -> _Guessed:
    """Index with masks: each mask selects all of its elements, or the same share of them."""
    numbers: list[Tensor | None] = []
    elements = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            elements = index.numel()
            numbers += [_empty(_part(elements, share)) for _ in range(index.ndim)]
        else:
            numbers.append(None if index is None else meta_like(index))
    return torch.ops.aten.index.Tensor(
        meta_like(tensor), numbers
    ), f"was taken to pick {_of(elements, share)} elements of its mask"


def _unique(
    tensor: Tensor,
    sorted: bool = True,
    inverse: bool = False,
    counts: bool = False,
    *,
    dim: int | None = None,
    share: float = 1,
) -> _Guessed:
    shape = [tensor.numel()] if dim is None else list(tensor.shape)
    places = tensor.shape if dim is None else (shape[dim],)
    elements = shape[dim or 0]
    shape[dim or 0] = found = _part(elements, share)
    return (
        _empty(*shape, dtype=tensor.dtype),
        _empty(*places) if inverse else _empty(0),
        _empty(found) if counts else _empty(0),
    ), f"was taken to find {_of(elements, share)} elements different"


def _unique_consecutive(
    tensor: Tensor,
    inverse: bool = False,
    counts: bool = False,
    dim: int | None = None,
    *,
    share: float = 1,
) -> _Guessed:
    return _unique(tensor, True, inverse, counts, dim=dim, share=share)


def _sparse(
    tensor: Tensor, *others: Any, share: float = 1, is_csr: bool = False, **named: Any
) -> _Guessed:
    found = _part(tensor.numel(), share)
    values = _empty(found, dtype=tensor.dtype)
    made = (
        torch.sparse_csr_tensor(
            _empty(len(tensor) + 1), _empty(found), values, tensor.shape, check_invariants=False
        )
        if is_csr
        else torch.sparse_coo_tensor(
            _empty(tensor.ndim, found), values, tensor.shape, check_invariants=False
        )
    )
    return made, f"was taken to find {_of(tensor.numel(), share)} elements that are not zero"


def _all_boxes(boxes: Tensor, *others: Any, share: float = 1) -> _Guessed:
    return _empty(
        _part(boxes.shape[0], share)
    ), f"was taken to keep {_of(boxes.shape[0], share)} boxes"


def _part(elements: int, share: float) -> int:
    return math.ceil(round(elements * share, 3))


def _of(elements: int, share: float) -> str:
    return f"all {elements:,}" if share == 1 else f"{_part(elements, share):,} of {elements:,}"


def _counts(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> _Guessed:
    """Count values: no more kinds than elements, or than the smallest length that the caller asks
    for."""
    kinds = minlength or values.numel()
    dtype = (
        torch.long
        if weights is None
        else weights.dtype
        if weights.dtype == torch.float32
        else torch.float64
    )
    return _empty(kinds, dtype=dtype), f"was taken to find values below {kinds:,}"


def _packed(sequence: Tensor, lengths: Tensor, batch_first: bool) -> _Guessed:
    batch, steps = sequence.shape[:2] if batch_first else sequence.shape[1::-1]
    whole = torch.full((batch,), steps, dtype=torch.long, device="cpu")
    return aten._pack_padded_sequence.default(
        meta_like(sequence), whole, batch_first
    ), f"was taken to get samples of {steps:,} steps"


def _repeated(times: Tensor, *, output_size: int | None = None) -> _Guessed:
    return _empty(output_size or times.numel()), "was taken to repeat each element once"


def _least_squares(matrix: Tensor, right: Tensor, *others: Any, **named: Any) -> _Guessed:
    """On CUDA the driver is gels: no ranks, no singular values."""
    *batch, rows, columns = matrix.shape
    several = right.shape[len(batch) + 1 :]
    of_columns = _empty(*batch, *several, dtype=matrix.dtype)
    none = _empty(0, dtype=matrix.dtype)
    solution = _empty(*batch, columns, *several, dtype=matrix.dtype)
    residuals = of_columns if rows > columns else none
    return (solution, residuals, _empty(0), none), "was taken to have a solution"


_SELECTIONS: Final[Mapping[str, _Guess]] = {
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::index": _indexed,
    "aten::_unique2": _unique,
    "aten::unique_dim": lambda tensor, dim, *asked, share=1: _unique(
        tensor, *asked, dim=dim, share=share
    ),
    "aten::_to_sparse": _sparse,
    "aten::_to_sparse_csr": partial(_sparse, is_csr=True),
    "aten::unique_consecutive": _unique_consecutive,
    "torchvision::nms": _all_boxes,
}
"""Guesses that can take a share of what they select."""
_GUESSES: Final[Mapping[str, _Guess]] = {
    "aten::_local_scalar_dense": lambda tensor, *others: (one(tensor.dtype), "was taken to be 1"),
    "aten::is_nonzero": _true,
    "aten::equal": _true,
    "aten::allclose": _true,
    "aten::bincount": _counts,
    "aten::_pack_padded_sequence": _packed,
    "aten::linalg_lstsq": _least_squares,
    "aten::repeat_interleave": _repeated,
    "aten::_nested_tensor_from_mask_left_aligned": lambda *tensors: (
        False,
        "was taken to be false: positions of padding are computed too",
    ),
    **dict.fromkeys(
        ("aten::_sample_dirichlet", "aten::_dirichlet_grad"),
        lambda tensor, *others: (meta_like(tensor), "was taken to return a tensor like its first"),
    ),
    **_SELECTIONS,
}


_OWN: Final = ("aten", "prims")
"""Where PyTorch's own operators are."""


def selects(operator: Any) -> bool:
    """Whether an operator selects elements by their values, of which a share can be taken."""
    return schema(operator).name in _SELECTIONS


def selection_of(operator: Any, share: float) -> _Guess | None:
    """Return what takes the place of an operator whose output depends on values; one that selects
    elements selects a share.

    ``None`` for other operators.  It is called with the operator's arguments.
    """
    if schema(operator).name in READS_VALUE_BELOW:
        return None
    guess = _GUESSES.get(schema(operator).name)
    if guess is None and operator.namespace not in _OWN and (sized := least_sized(operator)):
        return lambda *args, **named: (
            sized(*args, **named),
            "was taken to return as little as it can",
        )
    return partial(guess, share=share) if guess and selects(operator) else guess


def guess_of(operator: Any, args: Arguments, kwargs: Mapping[str, Any]) -> _Guess | None:
    """Return the guess for an operator, ``None`` if there is none."""
    guess = _GUESSES.get(schema(operator).name)
    return guess if guess or operator.namespace in _OWN else _foreign(operator, args, kwargs)


def _foreign(operator: Any, args: Arguments, kwargs: Mapping[str, Any]) -> _Guess | None:
    """Return the guess for an operator that is not PyTorch's; ``None`` if it returns several
    tensors, or numbers."""
    returns = [str(value.type) for value in schema(operator).returns]
    first = next(
        (leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)), None
    )
    if not returns:
        return lambda *args, **kwargs: (
            None,
            "was taken to allocate nothing, and to write into its arguments",
        )
    if returns != ["Tensor"] or first is None:
        return None
    shape = list(first.shape)
    return lambda *args, **kwargs: (
        meta_like(first),
        f"was taken to return a tensor like its first, of shape {shape}",
    )
