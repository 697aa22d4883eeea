"""The loops of a user's code, which a trace may leave early.

The code is changed as it is compiled: each ``for`` and ``while`` asks after a round whether it goes
on.  Evaluation, generation and steps of an environment repeat thousands of rounds.  Where the last
ones reached no new peak on the GPU, left nothing there, and trained nothing, the loop is left after
some seconds; a note says so where that is before the first steps.  A loop that trains is left once
the script has trained for long enough and its last rounds brought nothing new: what the script does
after it is traced too, such as an evaluation or another network.

Conditions on counters, such as ``step % 1000 == 0`` and ``epoch > 50``, are asked for, too.  One that
was never so in the steps that were traced is taken the other way then, because the run goes on; a
loop over a range ends with its last two numbers.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from time import process_time
from types import CodeType
from typing import Any, Final
from unittest.mock import patch

from gpumemnet.sandbox.user_code import is_user_code
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script.read_values import type_of
from gpumemnet.tracing.script.whole_run import called_name

_NAME: Final = "_gpumemnet_rounds"
_CONDITION: Final = "_gpumemnet_condition"
_COUNTS: Final = "_gpumemnet_counts"
_TYPE: Final = "_gpumemnet_type"
_ALWAYS: Final = {ast.Eq: True, ast.Not: True, ast.NotEq: False}
"""What a comparison, or ``not step % 1``, always is if it is that while its counter rises."""
_RISES: Final = 2
"""How often a number has risen from one step to the next that is taken for a counter."""
_CALM_ROUNDS: Final = 16
"""Rounds that bring nothing new, after which a loop may be left that does not train."""
_CALM_ROUNDS_OF_TRAINING: Final = 3
_SECONDS: Final = 5.0
"""CPU time in such a loop before it is left: a loop that fills a buffer should come to its end."""
_MORE_SECONDS: Final = 20.0
"""The same for a loop that may train later: a name that is called there leads to ``backward``."""
_LESS_SECONDS: Final = 1.0
"""The same after the first steps."""


@dataclass(slots=True)
class _Condition:
    """A condition that compares numbers of the script.

    Attributes:
        line: file and line.
        leaves: whether what follows leaves a loop or function.
        stays: whether it stays so once the counter is large enough.
        repeats: whether it holds for multiples; the first of them, 0, is often left out or has no
            state of an optimizer yet.
        always: what it always is if it is that while the counter rises: an equality such as
            ``step % 1 == 0`` true, its opposite false.
        seen: whether it held, so far.
        step: the last step at which it was met.
        first, last: the numbers at the first step, and at the last one.
        rises: how often one has risen; ``None`` if one has fallen, other than to its first value.
        later: what it is from now on.
    """

    line: str
    leaves: bool
    stays: bool
    repeats: bool
    always: bool | None
    seen: set[bool] = field(default_factory=set)
    step: int = 0
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    rises: int | None = 0
    later: bool | None = None

    def met(self, step: int, numbers: list[int]) -> None:
        """Learn how the numbers change from step to step."""
        if self.step and self.rises is not None:
            fell = any(
                a < b and a > c for a, b, c in zip(numbers, self.last, self.first, strict=False)
            )
            self.rises = None if fell else self.rises + (numbers > self.last)
        self.step, self.first, self.last = step, self.first or numbers, numbers


class Loops:
    """The loops of a running script.

    Args:
        recorder: records what is on the GPU.
        is_inside: whether a module, a backward pass or an optimizer runs: their loops stay.
        trained: returns optimizer steps, and optimizers made.
        is_cut: whether data loaders have ended early.
    """

    def __init__(
        self,
        recorder: Recorder,
        is_inside: Callable[[], bool],
        trained: Callable[[], tuple[int, int]],
        is_cut: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recorder, self._is_inside, self.trained = recorder, is_inside, trained
        self._is_cut = is_cut
        self._conditions: list[_Condition] = []
        self.waiting: dict[str, None] = {}
        """Places of conditions on counters that were never so, or always."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tops: defaultdict[str, int] = defaultdict(int)
        """Place of a loop → the most bytes on the GPU in a round."""
        self._called: defaultdict[str, set[str]] = defaultdict(set)
        """Place of a loop, or name of a function → names that it calls."""
        self.training: set[str] = set()
        self.making: set[str] = set()
        """Loops that run and have trained, and whose rounds make optimizers."""
        self.has_stepped = self.has_trained = False
        """Whether the script has trained for its first steps, and for as long as is wanted."""
        self.left: dict[str, None] = {}
        """Loops that were left before the first steps."""

    def rounds(self, place: str, items: Iterable[Any] = iter(int, 1)) -> Iterator[Any]:
        """Yield the items of a loop, keeping none of them; 0 for a ``while`` loop."""
        iterator, given, calm, most_bytes = iter(items), 0, 0, 0
        second, event, (steps, made) = process_time(), self._recorder.now(), self.trained()
        try:
            while True:
                has_trained = self.has_trained  # a last round takes conditions on counters
                yield next(iterator)
                given += 1
                if self._recorder.now() == event or self._is_inside():
                    continue
                top, end = self._recorder.levels_since(event)
                before = second, steps, made
                second, event, (steps, made) = process_time(), self._recorder.now(), self.trained()
                is_new = top > self._tops[place] or end > most_bytes or made > before[2]
                calm = 0 if is_new else calm + 1
                self._tops[place], most_bytes = max(top, self._tops[place]), max(end, most_bytes)
                self._seconds[place] += max(second - before[0], 0)  # a fork begins at 0
                if steps > before[1]:
                    self.training.add(place)
                # One that is made in the first round alone is kept.
                (self.making.add if made > before[2] else self.making.discard)(place)
                if place in self.training:
                    is_over = has_trained and calm >= _CALM_ROUNDS_OF_TRAINING
                else:
                    spent, least = self._seconds[place], _SECONDS
                    if self.has_stepped:
                        least = _LESS_SECONDS
                    elif spent > least and self._may_train(place):
                        least = _MORE_SECONDS
                    is_over = calm >= _CALM_ROUNDS and spent > least
                if is_over:
                    self.left.update({} if self.has_stepped else {place: None})
                    yield from _last(items, given) if place in self.training else ()
                    break
        except StopIteration:
            pass
        finally:
            self.training.discard(place)
        self.making.discard(place)  # not where the trace ends within

    def condition(self, number: int, holds: Any, *values: int) -> Any:
        """Return whether a condition holds.

        Args:
            number: which one of the script.
            holds: whether it does.
            values: the variables that it compares.
        """
        if type(holds) is not bool:
            return holds
        known, step = self._conditions[number], self.trained()[0]
        if known.later is not None:
            return known.later
        if self.has_stepped or not known.repeats:
            known.seen.add(holds)
        if len(known.seen) > 1 or not self.has_stepped or step == known.step or self._is_inside():
            return holds
        known.met(step, [*values])
        leaves = known.leaves and not holds
        if (known.rises or 0) < _RISES or leaves or holds is known.always:
            return holds
        if not (self.has_trained or self._is_cut()):
            self.waiting[known.line] = None
            return holds
        known.seen.add(not holds)
        known.later = not holds if known.stays else None
        self.waiting.pop(known.line, None)
        return not holds

    def changed(self, tree: ast.Module, path: str) -> ast.Module:
        """Return the code of a file with loops that can be left."""
        for node in ast.walk(tree):
            match node:
                case ast.Call(ast.Name("type"), [_]):
                    node.args.insert(0, node.func)
                    node.func = ast.Name(_TYPE, ast.Load())
        changed: ast.Module = _Changing(Path(path).name, self._called, self._conditions).visit(tree)
        return ast.fix_missing_locations(changed)

    def _may_train(self, place: str) -> bool:
        names, known = [place], {place}
        for name in names:
            names += self._called[name] - known
            known |= self._called[name]
        return "backward" in known

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which modules of the user's that are imported have such loops."""
        get_code = SourceFileLoader.get_code

        def changed(loader: Any, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if not is_user_code(path):
                return get_code(loader, name)
            tree = self.changed(ast.parse(loader.get_data(path), path), path)
            return compile(tree, path, "exec", dont_inherit=True)

        setattr(builtins, _NAME, self.rounds)
        setattr(builtins, _CONDITION, self.condition)
        setattr(builtins, _COUNTS, _are_integers)
        setattr(builtins, _TYPE, type_of)
        try:
            with patch.object(SourceFileLoader, "get_code", changed):
                yield
        finally:  # such modules may run again: a plan traces the script's model anew
            setattr(builtins, _NAME, lambda place, *items: items[0] if items else iter(int, 1))
            setattr(builtins, _CONDITION, lambda number, holds, *values: holds)


class _Changing(ast.NodeTransformer):
    """Changes the loops of a file; not those of generators, which others ask for items, and not
    those of code that a library compiles."""

    def __init__(
        self, file: str, called: defaultdict[str, set[str]], conditions: list[_Condition]
    ) -> None:
        self._file, self._called, self._conditions, self._leaves = file, called, conditions, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._called[node.name] |= set(map(called_name, ast.walk(node)))
        is_compiled = any("jit" in ast.unparse(each) for each in node.decorator_list)
        if is_compiled or any(
            isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node)
        ):
            return node
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = ast.copy_location(self._rounds(node, node.iter), node.iter)
        return self.generic_visit(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        for each in (node.body, node.orelse):
            each[:] = map(self.visit, each)
        names = {getattr(each, "id", "") for each in ast.walk(node.test)}
        if node.orelse or "len" in names:  # it waits until something is long enough
            return node
        test = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
        body = [ast.copy_location(test, node.test), *node.body]
        loop = ast.For(ast.Name("_round", ast.Store()), self._rounds(node), body, [])
        return ast.copy_location(loop, node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self._leaves = any(
            isinstance(each, ast.Break | ast.Return | ast.Raise) for each in node.body
        )
        node.test = self.visit(node.test)
        self._leaves = False
        for each in (node.body, node.orelse):
            each[:] = map(self.visit, each)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return self._condition(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        is_multiple = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.BinOp)
        return self._condition(node) if is_multiple else self.generic_visit(node)

    def _condition(self, test: ast.expr) -> ast.AST:
        """Return a comparison that is asked for where all that it compares are integers."""
        numbers = [*_numbers(test)]
        if not numbers or None in numbers:
            return test
        kinds = set(map(type, ast.walk(test)))
        repeats, stays = ast.Mod in kinds, not kinds & {ast.Eq, ast.NotEq, ast.Mod}
        always = _ALWAYS.get(type(getattr(test, "ops", [getattr(test, "op", None)])[0]))
        line = f"{self._file} line {test.lineno}"
        asked = _call(_CONDITION, ast.Constant(len(self._conditions)), test, *numbers)
        self._conditions.append(_Condition(line, self._leaves, stays, repeats, always))
        # Another one stays as it is: where it stands tells what a trace takes it to be.
        return ast.copy_location(ast.IfExp(_call(_COUNTS, *numbers), asked, test), test)

    def _rounds(self, loop: ast.stmt, *items: ast.expr) -> ast.Call:
        place = f"{self._file} line {loop.lineno}"
        self._called[place] |= set(map(called_name, ast.walk(loop)))
        return _call(_NAME, ast.Constant(place), *items)


def _last(items: Iterable[Any], given: int) -> Iterable[int]:
    """Return the last two numbers of a range, also where a bar shows them, but those ``given``."""
    numbers = getattr(items, "iterable", items)
    return numbers[max(given, len(numbers) - 2) :] if isinstance(numbers, range) else ()


def _call(name: str, *arguments: Any) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])


def _numbers(code: ast.AST) -> Iterator[ast.expr | None]:
    """Yield the variables in code that computes with numbers, and ``None`` for other code."""
    match code:
        case ast.Constant() | ast.Call(ast.Name("len")):
            return
        case ast.Name() | ast.Attribute() | ast.Subscript(slice=ast.Constant()):
            yield None if "(" in ast.unparse(code) else code
        case ast.BinOp() | ast.UnaryOp() | ast.Compare():
            for each in ast.iter_child_nodes(code):
                if isinstance(each, ast.expr):
                    yield from _numbers(each)
        case _:
            yield None


def _are_integers(*values: Any) -> bool:
    return all(type(each) is int for each in values)
