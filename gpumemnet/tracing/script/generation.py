"""Generation token by token, as passes of a model show it."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gpumemnet.extract.module_calls import tensors_in

GENERATION: Final = "generation"
"""Name of its phase."""
_SURE: Final = 8
"""Passes after which one that is as long as the last is a token, too: its prompt was cut."""


class Generation:
    """Passes without gradients whose inputs grow by one, or have one more after a longer one."""

    def __init__(self) -> None:
        self._shapes: WeakKeyDictionary[nn.Module, list[torch.Size]] = WeakKeyDictionary()
        self._first = 0
        """Identity of the module whose passes are the tokens."""
        self._live: list[int] = []
        """Bytes on the GPU after each pass that generated."""

    @property
    def phase(self) -> str:
        """Name of the phase of the next pass."""
        return GENERATION if len(self._live) > 1 else "evaluation"

    @property
    def sentence(self) -> str:
        """What a generation takes that was not seen to its end."""
        passes = len(self._live)
        each = max(self._live[-1] - self._live[0], 0) / max(passes - 1, 1)
        return (
            f"the trace ended within a generation, after {passes:,} tokens of it: each further token takes {each / 1024:,.1f} KiB "
            "more, and they are not in the answer"
        )

    def passed(self, module: nn.Module, arguments: object, live_bytes: int) -> None:
        """A pass without gradients has ended.

        Args:
            module: a model, or a part of one that the script calls by itself.
            arguments: its own.
            live_bytes: bytes on the GPU now.
        """
        is_known, before = module in self._shapes, self._shapes.get(module, [])
        shapes = self._shapes[module] = [each.shape for each in tensors_in(arguments)]
        pairs = [
            (old[1], new[1])
            for old, new in zip(before, shapes, strict=False)
            if len(new) == len(old) > 1 and old[0] == new[0]
        ]
        is_next = any(new == old + 1 or new == 1 < old for old, new in pairs)
        # Batches that are sorted by length are now as long, now longer by one.
        is_token = len(self._live) >= _SURE or any(new == 1 for _, new in pairs)
        is_first = self._first in (0, id(module))
        if is_next or (self._live and before == shapes and is_token):
            if is_first:
                self._first = id(module)
                self._live.append(live_bytes)
        elif is_first or not is_known:
            self._first = 0
            self._live.clear()
