"""The loops of a user's code, which a trace may leave early.

The code is changed as it is compiled: each ``for`` and ``while`` asks after a round whether it goes
on.  Evaluation, generation and steps of an environment repeat thousands of rounds.  Where the last
ones reached no new peak on the GPU, left nothing there, and trained nothing, the loop is left after
some seconds; a note says so where that is before the first steps.  A loop that trains is left once
the script has trained for long enough and its last rounds brought nothing new: what the script does
after it is traced too, such as an evaluation or another network.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from time import process_time
from types import CodeType
from typing import Any, Final, TypeVar
from unittest.mock import patch

from gpumemnet.sandbox.user_code import is_user_code
from gpumemnet.tracing.recorder import Recorder

_Item = TypeVar("_Item")

_NAME: Final = "_gpumemnet_loops"
_CALM_ROUNDS: Final = 16
"""Rounds that bring nothing new, after which a loop may be left that does not train."""
_CALM_ROUNDS_OF_TRAINING: Final = 3
_SECONDS: Final = 5.0
"""CPU time in such a loop before it is left: a loop that fills a buffer should come to its end."""
_LESS_SECONDS: Final = 1.0
"""The same after the first steps."""


@dataclass(slots=True)
class _Loop:
    """A loop, over all times that it runs.

    Attributes:
        second: CPU time at the end of its last round.
        event, steps, made: events, optimizer steps and optimizers at that time.
        spent_seconds: CPU time in its rounds.
        top_bytes: the most on the GPU in a round.
        end_bytes: the same at the end of a round, since it began: rounds may gather tensors.
        calm: its last rounds since it began that brought nothing new.
        trains: whether it has trained since it began.
    """

    second: float = 0
    event: int = 0
    steps: int = 0
    made: int = 0
    spent_seconds: float = 0
    top_bytes: int = 0
    end_bytes: int = 0
    calm: int = 0
    trains: bool = False


class Loops:
    """The loops of a running script.

    Args:
        recorder: records what is on the GPU.
        is_inside: whether a module, a backward pass or an optimizer runs: their loops stay.
        trained: returns optimizer steps, and optimizers made.
    """

    def __init__(
        self,
        recorder: Recorder,
        is_inside: Callable[[], bool],
        trained: Callable[[], tuple[int, int]],
    ) -> None:
        self._recorder = recorder
        self._is_inside = is_inside
        self._trained = trained
        self._loops: dict[str, _Loop] = {}
        self.has_stepped = self.has_trained = False
        """Whether the script has trained for its first steps, and for as long as is wanted."""
        self.left: list[str] = []
        """Loops that were left before the first steps."""

    @property
    def trains(self) -> bool:
        """Whether a loop runs that trains."""
        return any(loop.trains for loop in self._loops.values())

    def begin(self, place: str) -> None:
        """The loop at ``place`` begins."""
        loop = self._loops.setdefault(place, _Loop())
        loop.calm, loop.end_bytes, loop.trains = 0, 0, False
        self._measure(loop)

    def rounds(self, items: Iterable[_Item], place: str) -> Iterator[_Item]:
        """Yield the items of a ``for`` loop, and keep none of them."""
        iterator = iter(items)
        self.begin(place)
        try:
            while True:
                yield next(iterator)
                if not self.goes_on(place):
                    break
        except StopIteration:
            pass
        finally:
            self._loops[place].trains = False

    def goes_on(self, place: str) -> bool:
        """Whether the loop at ``place`` goes on after a round."""
        loop = self._loops[place]
        start = loop.event
        if self._recorder.now() == start or self._is_inside():
            return True
        second, steps, made = loop.second, loop.steps, loop.made
        self._measure(loop)
        loop.spent_seconds += loop.second - second
        top, end = self._recorder.top_since(start), self._recorder.live_bytes()
        is_calm = top <= loop.top_bytes and end <= loop.end_bytes and loop.made == made
        loop.calm = loop.calm + 1 if is_calm else 0
        loop.top_bytes, loop.end_bytes = max(top, loop.top_bytes), max(end, loop.end_bytes)
        loop.trains |= loop.steps > steps
        if loop.trains:
            is_over = self.has_trained and loop.calm >= _CALM_ROUNDS_OF_TRAINING
        else:
            least = _LESS_SECONDS if self.has_stepped else _SECONDS
            is_over = loop.calm >= _CALM_ROUNDS and loop.spent_seconds > least
        if is_over and not self.has_stepped and place not in self.left:
            self.left.append(place)
        return not is_over

    def _measure(self, loop: _Loop) -> None:
        loop.second, loop.event = process_time(), self._recorder.now()
        loop.steps, loop.made = self._trained()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which modules of the user's that are imported have such loops."""
        get_code = SourceFileLoader.get_code

        def changed(loader: Any, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if not is_user_code(path):
                return get_code(loader, name)
            tree = ast.parse(loader.get_data(path), path)
            return compile(changed_loops(tree, path), path, "exec", dont_inherit=True)

        with (
            patch.object(builtins, _NAME, self, create=True),
            patch.object(SourceFileLoader, "get_code", changed),
        ):
            yield


def changed_loops(tree: ast.Module, path: str) -> ast.Module:
    """Return the code of a file with loops that can be left."""
    generators: set[ast.AST] = set()
    _find_generators(tree, tree, generators)
    _Changing(Path(path).name, generators).visit(tree)
    return tree


def _find_generators(node: ast.AST, function: ast.AST, found: set[ast.AST]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Yield | ast.YieldFrom):
            found.add(function)
        inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        _find_generators(child, child if inner else function, found)


class _Changing(ast.NodeTransformer):
    """Changes the loops of a file; not those of generators, which others ask for items, and not
    those of code that a library compiles."""

    def __init__(self, file: str, generators: set[ast.AST]) -> None:
        self._file, self._generators = file, generators

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        is_compiled = any("jit" in ast.unparse(each) for each in node.decorator_list)
        return node if is_compiled or node in self._generators else self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = self._call("rounds", node.iter, node.iter, self._place(node))
        return self.generic_visit(node)

    def visit_While(self, node: ast.While) -> Any:
        if any(getattr(each, "id", "") == "len" for each in ast.walk(node.test)):
            return self.generic_visit(node)  # it waits until something is long enough
        place = self._place(node)
        begin = self._call("begin", node, place)
        goes_on = self._call("goes_on", node.test, place)
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [goes_on, node.test]), node.test)
        return [ast.copy_location(ast.Expr(begin), node), self.generic_visit(node)]

    def _place(self, node: ast.stmt) -> ast.expr:
        return ast.Constant(f"{self._file} line {node.lineno}")

    def _call(self, name: str, at: Any, *arguments: ast.expr) -> Any:
        function = ast.Attribute(ast.Name(_NAME, ast.Load()), name, ast.Load())
        call = ast.copy_location(ast.Call(function, list(arguments), []), at)
        return ast.fix_missing_locations(call)
