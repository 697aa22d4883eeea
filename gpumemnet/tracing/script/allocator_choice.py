"""Settings of the caching allocator that a script chooses itself, read where and when PyTorch reads
them.

PyTorch reads the environment when the allocator is first used, so a script may still set it in its
first lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from unittest.mock import patch

from gpumemnet.allocator.settings import AllocatorSettings, parse_settings, settings_text
from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.torch_private.names import replaced
from gpumemnet.torch_private.script import ALLOCATOR_SETTINGS, MEMORY_FRACTION

_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order in which PyTorch looks: it reads the second only if the first is not set."""


class AllocatorChoice:
    """The settings of a running script.

    Args:
        settings: those that the script is started with.
        note: called with a note on settings that the script chooses.
    """

    def __init__(self, settings: AllocatorSettings, note: Callable[[str], None]) -> None:
        self.settings = settings
        self._given = settings_text(settings)
        self._note = note
        self._is_used = False

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Context in which the script may choose; the environment begins with the settings that it
        is started with."""
        with patch.dict(os.environ):
            for variable in _VARIABLES:
                os.environ.pop(variable, None)
            if self._given:
                os.environ[_VARIABLES[0]] = self._given
            with replaced([(ALLOCATOR_SETTINGS, self._choose), (MEMORY_FRACTION, self._limit)]):
                yield

    def first_used(self) -> None:
        """The first memory on the GPU is about to be allocated: read the environment, once."""
        if self._is_used:
            return
        self._is_used = True
        variable, text = next(
            ((each, os.environ[each]) for each in _VARIABLES if os.environ.get(each)), ("", "")
        )
        if text and text != self._given:
            self._choose(text, variable)

    def _choose(self, text: str, name: str = "the allocator's settings") -> None:
        try:
            self.settings = parse_settings(text)
        except InvalidRequestError as error:
            raise ExtractError(f"the script sets {name} to {text!r}: {error}") from None
        self._is_used = True
        self._note(f"the script sets {name} to {text}")

    def _limit(self, fraction: float, device: object = None) -> None:
        """Replace ``torch.cuda.set_per_process_memory_fraction``."""
        self.settings = replace(self.settings, per_process_memory_fraction=fraction)
        self._note(f"the script sets the share of the GPU that it may use to {fraction}")
