"""Finds scripts whose validation keeps its activations: a trace ends before such a pass meets those
of training.

``.eval()`` does not stop autograd.  Code that calls it and names nothing that does may keep the
graph of a validation pass while the next training pass makes its own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.sandbox.user_code import is_user_code
from gpumemnet.tracing.timeline import Timeline

_EVALUATES: Final = "eval"
_STOPS_AUTOGRAD: Final = frozenset(
    {"no_grad", "inference_mode", "set_grad_enabled", "requires_grad", "requires_grad_", "volatile"}
)
_KEPT: Final = "saved_activation"


def user_files(script: Path) -> Iterator[Path]:
    """Yield the script's file and those of its own folder that it has imported."""
    yield script
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if (
            file
            and file.endswith(".py")
            and is_user_code(file)
            and Path(file).is_relative_to(script.parent)
        ):
            yield Path(file)


def unguarded_validation(files: Iterable[Path]) -> str:
    """Return where the code first calls ``.eval()`` if nothing in it stops autograd; empty
    otherwise."""
    found = ""
    for file in files:
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (OSError, SyntaxError, ValueError):  # nothing can be said of it
            return ""
        names = {
            getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            for node in nodes
        }
        if names & _STOPS_AUTOGRAD:
            return ""
        lines = [
            node.lineno
            for node in nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == _EVALUATES
        ]
        found = found or (f"{file.name} line {min(lines)}" if lines else "")
    return found


def largest_graph_bytes(timeline: Timeline) -> int:
    """Return the most bytes that activations take which are kept for a backward pass."""
    live = largest = 0
    for event in timeline.events:
        if event != EMPTY_CACHE:
            storage = timeline.storages[event if event >= 0 else ~event]
            live += (storage.memory_class == _KEPT) * (
                storage.size_bytes if event >= 0 else -storage.size_bytes
            )
            largest = max(largest, live)
    return largest
