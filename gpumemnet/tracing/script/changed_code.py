"""A user's code as it runs in a trace: loops that may be left, conditions on numbers that are asked
for, and statements after whose errors the run may go on.

What it calls is in :mod:`gpumemnet.tracing.script.loops`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final
from unittest.mock import patch

ROUNDS: Final = "_gpumemnet_rounds"
CONDITION: Final = "_gpumemnet_condition"
COUNTS: Final = "_gpumemnet_counts"
DUE: Final = "_gpumemnet_due"
ENUMERATED: Final = "_gpumemnet_enumerated"
TYPE: Final = "_gpumemnet_type"
CONTINUES: Final = "_gpumemnet_continues"
BEST: Final = "_gpumemnet_best"
CUT: Final = "_gpumemnet_cut"
ENDS: Final = "_gpumemnet_ends"
NEAR_END: Final = "_gpumemnet_near_end"
LOOKED: Final = "_gpumemnet_looked"
"""Names of what changed code calls."""
UNWATCHED: Final[dict[str, Any]] = {
    ROUNDS: lambda place, *items, ends=None: items[0] if items else iter(int, 1),
    BEST: lambda place, holds: holds,
    COUNTS: lambda *about: False,
    DUE: lambda *places: False,
    ENUMERATED: enumerate,
    CONTINUES: lambda: False,
    CUT: lambda: False,
    ENDS: (),
    NEAR_END: lambda counter, *limit: counter,
    LOOKED: lambda place: (),
}
"""What these are once nothing is traced any more."""
_LENGTHENS: Final = {"append", "extend"}
_LENGTHS: Final = {"len", "size"}
"""Functions that change nothing, by which a loop finds its end."""
_LISTS: Final = re.compile(r"len\((.+?)\)")
_EXITS: Final = ("exit", "quit")
_CLOCKS: Final = ("time", "perf_counter", "monotonic")
_COMPUTES: Final = ("int", "float", "round", "abs", "min", "max", "math.floor", "math.ceil")
"""Functions that make a number of others."""
_READS: Final = (".all", ".any", ".item", ".isnan", ".isfinite")
"""Methods that read values of a tensor, and do nothing else."""
_BEST: Final = re.compile(r"best|(?<![a-z])(max|min)(?![a-z])", re.IGNORECASE)
"""Names of what is best so far."""
_SEARCHES: Final = ("bisect", "bisect_left", "bisect_right", "searchsorted", "digitize")
"""Functions that find the place of a number among others."""


def changed_code(tree: ast.Module, file: str, called: defaultdict[str, set[str]]) -> ast.Module:
    """Return the code of a file as it runs in a trace.

    Args:
        tree: the code, which is changed in place.
        file: name of the file.
        called: gets the names that are called in each loop and function.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("type"), [of]) if not isinstance(of, ast.Starred):
                node.args.insert(0, node.func)
                node.func = ast.Name(TYPE, ast.Load())
    return ast.fix_missing_locations(_Changing(file, called).visit(tree))


class _Changing(ast.NodeTransformer):
    """Changes the loops, conditions and statements of a file; not the loops of generators, which
    others ask for items, and no code that a library compiles."""

    def __init__(self, file: str, called: defaultdict[str, set[str]]) -> None:
        self._file, self._called = file, called
        self._leaves = self._is_generator = self._is_within = self._loops = False
        self._bounds: bool | None = None
        """What a condition is while something grows that it bounds."""
        self._scope = ""
        """Name of the function, or place of the loop, that a statement is in."""
        self._positions: frozenset[str] = frozenset()
        self._shapes: frozenset[str] = frozenset()
        self._made: frozenset[str] = frozenset()
        """Variables that a function makes anew each time."""
        self._counters: set[str] = set()
        """What the code adds to."""
        self._bests: dict[ast.expr, ast.expr] = {}
        """Comparisons with what is best so far → what is compared."""
        self._ends: dict[ast.If, str] = {}
        """Conditions that end an endless loop → its place."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self._counters = {
            ast.unparse(each.target) for each in ast.walk(node) if isinstance(each, ast.AugAssign)
        }
        scopes = ast.FunctionDef | ast.ClassDef
        self._positions = _positions(each for each in node.body if not isinstance(each, scopes))
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._called[node.name] |= set(map(_called_name, ast.walk(node)))
        is_compiled = any("jit" in ast.unparse(each) for each in node.decorator_list)
        if is_compiled:
            return node
        yields = (ast.Yield, ast.YieldFrom)
        is_generator = any(isinstance(each, yields) for each in ast.walk(node))
        positions, shapes = _positions([node]), _sizes(node)
        with patch.multiple(
            self,
            _scope=node.name,
            _is_generator=is_generator,
            _loops=any(isinstance(each, ast.For | ast.While) for each in ast.walk(node)),
            _positions=positions,
            _shapes=shapes,
            _made=_made_anew(node),
        ):
            return self.generic_visit(node)

    def _may_fail(self, node: ast.Expr | ast.Assign | ast.AugAssign) -> ast.stmt:
        """Return a statement after whose error the run may go on; variables that it assigns are 0
        then."""
        parts = [*ast.walk(node)]
        targets = [each for one in getattr(node, "targets", ()) for each in ast.walk(one)]
        stored = [each for each in targets if isinstance(getattr(each, "ctx", 0), ast.Store)]
        calls = any(isinstance(each, ast.Call) for each in parts)
        self.generic_visit(node)
        if not calls or any(isinstance(each, ast.Yield | ast.YieldFrom) for each in parts):
            return node
        ends = ast.If(ast.UnaryOp(ast.Not(), _call(CONTINUES)), [ast.Raise()], [])
        names = [each.id for each in stored if isinstance(each, ast.Name)]
        zeros = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(0)) for name in names]
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ends, *zeros])
        return ast.copy_location(ast.Try([node], [handler], [], []), node)

    visit_Expr = visit_AugAssign = _may_fail

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(part := node.value, ast.Subscript):
            kept, text = ast.unparse(node.targets[0]), ast.unparse(part)
            most = re.fullmatch(rf"(sorted\()?{re.escape(kept)}(,.*)?\)?\[[-:](\w[\w.]*):?\]", text)
            if most:  # best = best[-40:] asks for a length, as a condition does
                code = f"({kept}.__class__ is [].__class__ and len({kept}) > {most[3]}, 0)[1]"
                asked: Any = ast.increment_lineno(ast.parse(code), node.lineno - 1).body[0]
                node.value, asked.value.value.elts[1] = asked.value, part
        return self._may_fail(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.generic_visit(node)
        caught = [ast.unparse(each.type or ast.Constant("BaseException")) for each in node.handlers]
        if any("BaseException" in each for each in caught):  # what ends the trace among others
            ends = ast.ExceptHandler(ast.Name(ENDS, ast.Load()), None, [ast.Raise()])
            node.handlers.insert(0, ends)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        for each in ast.walk(node.iter):  # also within a bar
            match each:
                case ast.Call(ast.Name("enumerate") as function):
                    function.id = ENUMERATED
        if self._is_generator:
            return self.generic_visit(node)
        node.iter = ast.copy_location(self._rounds(node, node.iter), node.iter)
        place = self._place(node)
        with patch.object(self, "_scope", place):
            self.generic_visit(node)
        # Others do not look ahead, and Python has 20 nested blocks.
        if "range(" in ast.unparse(node.iter):
            self._called[place].add(LOOKED)
            looked = ast.ExceptHandler(_call(LOOKED, ast.Constant(place)), None, [ast.Pass()])
            node.body = [ast.copy_location(ast.Try(node.body, [looked], [], []), node.body[0])]
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        exits = [*_exits(node)] if isinstance(node.test, ast.Constant) else []
        returns = any(getattr(each, "value", None) for each in exits)
        only_returns = returns and not any(isinstance(each, ast.Break) for each in exits)
        conditions = [each for each in exits if isinstance(each, ast.If)]
        # The ends are in the list, too. One that returns may be of a failure, or a limit.
        is_sure = len(conditions) == 1 or not any(isinstance(each, ast.Return) for each in exits)
        if is_ended := is_sure and len(exits) == 2 * len(conditions) > 0:
            self._ends[min(conditions, key=lambda each: each.lineno)] = self._place(node)
        with patch.object(self, "_scope", self._place(node)):
            for each in (node.body, node.orelse):
                each[:] = map(self.visit, each)
        names, counted = {getattr(each, "id", "") for each in ast.walk(node.test)}, _counted(node)
        has_length = "len" in names
        if self._is_generator or node.orelse or (has_length and not counted):  # which it waits for
            return node
        test = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
        body = [ast.copy_location(test, node.test), *counted, *node.body]
        rounds = self._rounds(node)
        if is_ended or only_returns or has_length:
            rounds.keywords.append(ast.keyword("ends", ast.Constant(is_ended)))
        loop = ast.For(ast.Name("_round", ast.Store()), rounds, body, [])
        return ast.copy_location(loop, node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Compare | ast.Name | ast.Attribute):
            # Of a loop that was left, less was counted than the code expects.
            either = ast.BoolOp(ast.Or(), [node.test, _call(CUT)])
            node.test = ast.copy_location(either, node.test)
        return node

    def _comprehension(self, node: ast.AST) -> ast.AST:
        with patch.object(self, "_is_within", True):
            return self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_If(self, node: ast.If) -> ast.AST:
        self._leaves = any(
            _called_name(getattr(each, "value", each)) in _EXITS
            or isinstance(each, ast.Break | ast.Raise)
            or (isinstance(each, ast.Return) and not self._answers(each))
            for each in node.body
        )
        # A pool counts what it adds; of a queue the oldest go.
        assigned = {*map(ast.unparse, node.body)}
        counted = {each.partition(" ")[0] for each in assigned}
        tested = {*map(ast.unparse, ast.walk(node.test))}
        calls = {_called_name(getattr(each, "value", each)) for each in node.body}
        adds = calls & _LENGTHENS and counted & tested
        shortened = {*map(_shortened, node.body)} - {None} - tested
        self._bounds = False if shortened else bool(adds) or None
        place = f"{self._file} line {node.lineno} ({ast.unparse(node.test)})"
        is_amount = _compares_amounts(node.test)
        leaves = len(node.body) == 1 and isinstance(node.body[0], ast.Return | ast.Continue)
        inner = (_called_name(each) for one in node.body for each in ast.walk(one))
        self._called[place] |= {self._scope} if leaves else set(inner)
        match node.test:
            case ast.BinOp(op=ast.Mod()) as rest:
                is_left = ast.Compare(rest, [ast.NotEq()], [ast.Constant(0)])
                node.test = ast.copy_location(is_left, rest)
            case ast.BoolOp(values=parts):
                parts[:] = sorted(parts, key=lambda part: not _counts_alone(part, parts))
        for each in getattr(node.test, "values", [node.test]):
            if isinstance(each, ast.Compare):
                sides = each.left, each.comparators[0]
                for score, best in (sides, sides[::-1]):
                    is_best = _BEST.search(ast.unparse(best)) and "(" not in ast.unparse(score)
                    if is_best and f"{ast.unparse(best)} = {ast.unparse(score)}" in assigned:
                        is_named = "best" in ast.unparse(best).lower()
                        self._bests[each] = ast.Constant(None) if is_named else score
        node.test = self.visit(node.test)
        if is_amount:
            due: ast.expr = _call(DUE, ast.Constant(place))
            kind, due = (ast.And(), ast.UnaryOp(ast.Not(), due)) if leaves else (ast.Or(), due)
            node.test = ast.copy_location(ast.BoolOp(kind, [due, node.test]), node.test)
        if node in self._ends:
            ended = _call(DUE, ast.Constant(place), ast.Constant(self._ends[node]))
            node.test = ast.copy_location(ast.BoolOp(ast.Or(), [ended, node.test]), node.test)
        self._leaves, self._bounds = False, None
        for each in (node.body, node.orelse):
            each[:] = map(self.visit, each)
        return node

    def _answers(self, end: ast.Return) -> bool:
        """Whether a function only answers, as one that tells the size in an epoch, and leaves no loop
        that may train."""
        value = getattr(end.value, "value", end.value)
        return isinstance(value, bool) or (value is not None and not self._loops)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        place = f"{self._file} line {node.lineno}"
        test = self._condition(node)
        if (score := self._bests.get(node)) is None:
            return test
        return ast.copy_location(_call(BEST, ast.Constant(place), test, score), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._condition(node) if _is_search(node) else self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        is_multiple = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.BinOp)
        return self._condition(node) if is_multiple else self.generic_visit(node)

    def _condition(self, test: ast.expr) -> ast.AST:
        """Return a comparison that is asked for where all that it compares are numbers, or a number
        and a collection of numbers."""
        collection: ast.expr = ast.Constant(None)
        compared = test
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In):
            compared, collection = test.left, test.comparators[0]
            if "(" in ast.unparse(collection)[1:]:
                return test
        numbers = {ast.unparse(each or test): each for each in _numbers(compared)}
        if not numbers or None in numbers.values():
            return test
        kinds = set(map(type, ast.walk(test)))
        stays = not kinds & {ast.Eq, ast.NotEq, ast.Mod, ast.In}
        names = {text: f"_{place}" for place, text in enumerate(numbers)}
        holds_at = ast.parse(
            f"lambda {', '.join(names.values())}: {ast.unparse(test)}", mode="eval"
        )
        line = f"{self._file} line {test.lineno} ({ast.unparse(test)})"
        is_position = stays and not self._positions.isdisjoint(numbers)
        sizes = tuple(text.startswith("len(") for text in numbers)
        is_of_one = self._is_within or any(f"len({each})" in numbers for each in self._made)
        if is_of_one and all(sizes):  # many lengths, such as of words
            return test
        is_shape = any(".shape" in each or each in self._shapes for each in numbers)
        about: Any = (
            line,
            self._leaves,
            stays,
            ast.Mod in kinds,
            is_position,
            sizes,
            is_shape,
            next(iter(numbers)) in self._counters,
            self._bounds if stays else None,
        )
        known = ast.Constant(about)
        asked = _call(
            CONDITION,
            known,
            _Renaming(names).visit(holds_at.body),
            collection,
            *numbers.values(),
        )
        # Another one stays as it is: where it stands tells what a trace takes it to be.
        counts = _call(COUNTS, known, collection, *numbers.values())
        return ast.copy_location(ast.IfExp(counts, asked, test), test)

    def _rounds(self, loop: ast.stmt, *items: ast.expr) -> ast.Call:
        place = self._place(loop)
        nodes = [*ast.walk(loop)]
        self._called[place] |= set(map(_called_name, nodes))
        if any(
            isinstance(each, ast.Delete) or (isinstance(each, ast.List) and not each.elts)
            for each in nodes
        ):
            self._called[place].add("clear")
        return _call(ROUNDS, ast.Constant(place), *items)

    def _place(self, loop: ast.stmt) -> str:
        return f"{self._file} line {loop.lineno}"


def _shortened(statement: ast.stmt) -> str | None:
    """What a statement takes the first entries out of, as ``rows = rows[1:]`` does."""
    match statement:
        case ast.Assign(
            [target],
            ast.Subscript(
                whole, ast.Slice(ast.expr(), None) | ast.Tuple([ast.Slice(ast.expr(), None), *_])
            ),
        ) if (name := ast.unparse(target)) == ast.unparse(whole):
            return name
    return None


def _counted(loop: ast.While) -> list[ast.stmt]:
    """Return what sets the counter of a loop near its end, if there is one."""
    match loop.test:
        case ast.Compare(first, [ast.Lt() | ast.LtE() as order], [limit]):
            is_sum = isinstance(getattr(first, "op", None), ast.Add)
            counter = getattr(first, "left", first) if is_sum else first
            counted, end = ast.unparse(counter), ast.unparse(limit)
            targets = (
                target
                for each in ast.walk(loop)
                for target in getattr(each, "targets", [getattr(each, "target", None)])
            )
            assigned = {ast.unparse(each) for each in targets if each}
            calls = {_called_name(each) for each in ast.walk(limit) if isinstance(each, ast.Call)}
            used = {
                ast.unparse(each)
                for each in ast.walk(loop)
                if isinstance(each, ast.Subscript | ast.Attribute)
            }
            lists = _LISTS.findall(end)
            grows = any(f"{name}.append" in used for name in lists)
            if calls <= _LENGTHS and not grows and counted in assigned:
                more = str(int(isinstance(order, ast.LtE)))
                if is_sum:
                    end += f" - ({ast.unparse(first)}) + {counted}"
                walked = (name for name in lists if f"{name}[{counted}]" in used)
                given = ", ".join([counted, end, more, *walked])
                code = ast.parse(f"{counted} = {NEAR_END}({given})")
                return ast.increment_lineno(code, loop.lineno - 1).body
    return []


def _exits(loop: ast.While) -> Iterator[ast.AST]:
    """Yield what leaves a loop, and the conditions on amounts that do."""
    left: list[tuple[ast.AST, bool]] = [(each, False) for each in loop.body]
    for node, is_inner in left:
        last = node
        if isinstance(node, ast.If) and _compares_amounts(node.test, ast.Eq):
            last = node.body[-1]
        if isinstance(last, ast.Return) or (isinstance(last, ast.Break) and not is_inner):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            is_within = is_inner or isinstance(node, ast.For | ast.While)
            left += [(each, is_within) for each in ast.iter_child_nodes(node)]


class _Renaming(ast.NodeTransformer):
    """Puts names in the place of code."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> ast.AST:
        name = self._names.get(ast.unparse(node))
        renamed: ast.AST = ast.Name(name, ast.Load()) if name else super().visit(node)
        return renamed


def _called_name(node: ast.AST) -> str:
    """The last name of what a call calls; empty for other code."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_search(call: ast.Call) -> bool:
    """Whether a call of a library only finds the place of a number."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    is_fixed = all(isinstance(each.value, ast.Constant) for each in call.keywords)
    return name in _SEARCHES and owner in ("", "bisect", "np", "numpy", "torch") and is_fixed


def _positions(code: Iterable[ast.AST]) -> frozenset[str]:
    """The variables that slices begin or end with, or that are added up in an index."""
    indices = (
        each.slice for one in code for each in ast.walk(one) if isinstance(each, ast.Subscript)
    )
    added = (each for each in indices if isinstance(each, ast.Slice | ast.BinOp))
    return frozenset(ast.unparse(each) for index in added for each in ast.walk(index))


def _sizes(function: ast.FunctionDef) -> frozenset[str]:
    """The variables of a function that it assigns shapes or lengths to."""
    assigned = (each for each in ast.walk(function) if isinstance(each, ast.Assign))
    found = (
        each for each in assigned if re.search(r"\.shape|\.size\(|len\(", ast.unparse(each.value))
    )
    return frozenset(
        ast.unparse(each) for one in found for target in one.targets for each in ast.walk(target)
    )


def _made_anew(function: ast.FunctionDef) -> frozenset[str]:
    """The variables of a function without loops that are other ones each time it is called."""
    nodes = [*ast.walk(function)]
    if any(isinstance(each, ast.For | ast.While) for each in nodes):
        return frozenset()
    names = [each for each in nodes if isinstance(each, ast.Name) and hasattr(each, "lineno")]
    first: dict[str, bool] = {}
    # Of one line, what stands on the right is read before what stands on the left is assigned.
    for each in sorted(names, key=lambda name: (name.lineno, -name.col_offset)):
        first.setdefault(each.id, isinstance(each.ctx, ast.Store))
    outer = {
        name for each in nodes if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names
    }
    return frozenset(name for name, is_stored in first.items() if is_stored) - outer


def _call(name: str, *arguments: Any) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])


def _numbers(code: ast.AST) -> Iterator[ast.expr | None]:
    """Yield the variables in code that computes with numbers, and ``None`` for other code."""
    match code:
        case ast.Constant():
            return
        case ast.Call(ast.Name("len"), [of]):
            if "(" not in ast.unparse(of):  # what is called would be called again
                yield code
        case ast.Call(ast.Attribute() | ast.Name(), []) if _called_name(code) in _CLOCKS:
            yield code
        case ast.Call(ast.Attribute(of, "item"), []):
            yield None if "(" in ast.unparse(of) else code
        case ast.Name() | ast.Attribute() | ast.Subscript(slice=ast.Constant()):
            yield None if "(" in ast.unparse(code) else code
        case ast.Call() if not (_is_search(code) or ast.unparse(code.func) in _COMPUTES):
            yield None
        case ast.BinOp(op=ast.Pow() | ast.LShift()):  # of a number far ahead there is no end
            yield None
        case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.Call() | ast.List():
            for each in getattr(code, "args", ast.iter_child_nodes(code)):
                if isinstance(each, ast.expr):
                    yield from _numbers(each)
        case _:
            yield None


def _counts_alone(part: ast.expr, parts: list[ast.expr]) -> bool:
    """Whether a part of a test compares variables that no other part names, and others only read
    values of tensors: it is asked first, as nothing else may tell at which number it changes."""
    others = [each for other in parts if other is not part for each in ast.walk(other)]
    calls = [ast.unparse(each.func) for each in others if isinstance(each, ast.Call)]
    reads = bool(calls) and all(each.endswith(_READS) for each in calls)
    numbers = [*_numbers(part)] if isinstance(part, ast.Compare) else []
    names = {each.id for each in others if isinstance(each, ast.Name)}
    alone = (isinstance(each, ast.Name) and each.id not in names for each in numbers)
    return reads and bool(numbers) and all(alone)


def _compares_amounts(test: ast.expr, *others: type[ast.cmpop]) -> bool:
    """Whether a test asks which of two numbers is larger, or in ``others`` ways, and calls nothing
    else."""
    calls = [each for each in ast.walk(test) if isinstance(each, ast.Call)]
    orders: tuple[type[ast.cmpop], ...] = (ast.Gt, ast.GtE, ast.Lt, ast.LtE, *others)
    return any(isinstance(each, orders) for each in ast.walk(test)) and all(
        _called_name(each) in ("len", "size") for each in calls
    )
