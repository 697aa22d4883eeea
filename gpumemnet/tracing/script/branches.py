"""Code that branches on values that a trace does not compute: where it does, which way it usually
goes, and the traces of the other ways.

A place is read from the source around it.  An ``assert`` holds, and a branch that only raises is not
taken.  A loop that waits for a value runs a few times and ends.  A branch that leaves a loop or a
function is not taken at first.  Where one of two numbers is taken, it is that of the GPU.  What only
decides what is printed or saved, such as the best number so far, goes one way.  Each other condition
is false at first.  Then the script is traced once more with every condition the
other way, and with single ones the other way; the largest counts.

Where an error ends the script, a number that was read may be why, such as a length of 0: it is
traced once more with values that are made up, and once more with loops that were left before the
first steps run to their end.

This module loads no torch, so the command line uses it.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import inf
from time import monotonic
from types import CodeType, FrameType
from typing import Final

from gpumemnet.errors import CodeEndedError, ExtractError
from gpumemnet.sandbox.user_code import is_user_code, place_text, variables_of
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.units import MIB

ROUNDS: Final = 4
"""How often a loop runs that waits for a value."""
MOST_ROUNDS: Final = 64
"""The same of one whose condition compares a counter on the GPU."""
MOST_TRACES: Final = 6
"""Traces with a single condition the other way."""
SECONDS: Final = 30.0
"""Time for all traces of a script: further ones are made while there is time for one more."""
WENT_ON: Final = "the run went on after errors"
_READ: Final = "read from the GPU"
"""Parts of notes on errors, and on values."""
_Parents = dict[ast.AST, ast.AST | None]
"""The parent of each node of a file's code."""
_TELLING: Final = (ast.Break, ast.Continue, ast.If, ast.Assign, ast.AugAssign, ast.Expr)
"""Statements that may only tell something, after those that end a round of a loop."""
_ENDS: Final = (ast.Break, ast.Return)
_LEAVES: Final = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_TESTS: Final = (ast.Compare, ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Match, ast.Subscript)
_ORDERS: Final = ("max", "min", "sorted")
"""Functions of Python that compare numbers and return them."""
_ACTS: Final = re.compile(
    r"(?<!\w)(?!("
    r"print|info|debug|(warn|log|write|add_(scal|text)|dump|copy|set_(desc|post))\w*|\w*save\w*"
    r"|flush|format|join|exists|isdir|isfile|hasattr|ma?k\w*dirs?|float|int|str|round|abs|max|min|len|item|dict|time"
    r"|any|all|sum|mean|norm|detach|cpu|numpy|deepcopy|(load_)?state_dict"
    r")\()[\w\])]+\(|\.\w+ [-+*/]?= "
)
"""A call that does more than to tell or save something, or to make numbers and copies for that; or an
attribute that gets a value, which other files may read."""
_RUNS: Final = re.compile(r"(?<!\w)(log|write|dump|copy|\w*save)\w*\(")
"""A call of these that may be the user's own, and run a model."""
_TRAINS: Final = re.compile(r"backward\(|opt\w*\.step\(")
_FINITE: Final = ("isnan", "isinf", "isfinite", "istft")
"""Functions that ask whether numbers are finite, or whether a window is nowhere 0."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a run takes for conditions on values that nothing computes.

    Attributes:
        opposite: whether each is the opposite of what it usually is.
        exceptions: places where it is as ``opposite`` does not say.
        selected_share: share of the elements that operators select which select by values.
        makes_up: whether values are made up that are not known, see
            :class:`~gpumemnet.extract.host_numbers.HostNumbers`.
        is_patient: whether loops before the first steps run to their own end.
    """

    opposite: bool = False
    exceptions: tuple[str, ...] = ()
    selected_share: float = 1
    makes_up: bool = False
    is_patient: bool = False

    def reverse(self, place: str) -> bool:
        """Whether the condition at ``place`` is the opposite of what it usually is."""
        return self.opposite != (place in self.exceptions)


USUAL: Final = Assumptions()
"""Every condition is what it usually is."""
_MADE_UP: Final = Assumptions(makes_up=True)
_PATIENT: Final = Assumptions(is_patient=True)
_AFTER_ERRORS: Final = {
    _MADE_UP: "values read from the GPU were made up (normally distributed, and what follows from "
    "them): with the usual ones the script met an error",
    _PATIENT: "loops before the first steps ran to their own end: when they were left, the script "
    "met an error",
}
"""What is tried where a run met an error, perhaps only of the trace → a note that says so."""
LEFT: Final = "before the first steps, loops were left after some seconds"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the code that reads an unknown value.

    Attributes:
        name: file, line and function.
        usual: what the condition usually is, if the code around it tells.
        is_settled: whether it is always that.
        repeats: whether it decides how often a loop runs.
        is_chosen_by: whether the value that is read decides how the code goes on.
        is_returned: whether the function returns it, so that who calls it decides.
        compares: whether it is a comparison.
        compared_with: a number that turns the comparison, if the code tells what it is compared
            with.
        bounds: what elements stay below as long as a loop runs, such as a number of steps.
        rounds: how often a loop runs.
        ends_range: whether it ends a loop over a range that does not use its number.
    """

    name: str
    usual: bool | None = None
    is_settled: bool = False
    repeats: bool = False
    is_chosen_by: bool = False
    is_returned: bool = False
    compares: bool = False
    compared_with: float | None = None
    bounds: tuple[str, ...] = ()
    rounds: int = ROUNDS
    ends_range: bool = False


def place_of(frame: FrameType) -> Place:
    """Return the place that ``frame`` runs."""
    place = _place(frame.f_code, frame.f_lasti, frame.f_lineno)
    if place.is_returned and not place.is_chosen_by and frame.f_back:
        return replace(place, is_chosen_by=place_of(frame.f_back).is_chosen_by)
    for name in place.bounds:
        with suppress(Exception):  # of the user's code, of any kind
            bound = eval(name, frame.f_globals, variables_of(frame))  # noqa: S307  # a name of the user's
            if type(bound) is int and 0 < bound <= MOST_ROUNDS:
                return replace(place, rounds=bound)
    return place


def asks_once(frame: FrameType) -> bool:
    """Whether ``frame`` runs ``next(…)``, or the method, and nothing around it waits for the end."""
    node, parents = _node(frame.f_code, frame.f_lasti)
    if not isinstance(node, ast.Call):
        return False
    if ast.unparse(node.func).rpartition(".")[2] not in ("next", "__next__"):
        return False
    for parent in _ancestors(node, parents):
        if isinstance(parent, ast.ExceptHandler):  # the loader has begun again
            return True
        if isinstance(parent, ast.Try):
            return False
    return True


def is_guarded(
    frame: FrameType | None, kind: type[BaseException], *, also_told: bool = True
) -> bool:
    """Whether an error of this kind that ``frame`` raises is handled by code of the user's;
    ``also_told``: or told, and raised again."""
    names = {each.__name__ for each in kind.__mro__}
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            node, parents = _node(frame.f_code, frame.f_lasti)
            around = () if node is None else _ancestors(node, parents)
            if any(not names.isdisjoint(_handled(each, also_told)) for each in around):
                return True
        is_script = frame.f_globals.get("__name__") == "__main__"
        frame = None if is_script and frame.f_code.co_name == "<module>" else frame.f_back
    return False


def _handled(node: ast.AST, also_told: bool) -> set[str]:
    """The names of the errors that ``try`` or ``with suppress(…)`` handles, or only tells."""
    kinds: list[ast.AST | None] = []
    if isinstance(node, ast.Try):
        kinds = [
            each.type
            for each in node.handlers
            if also_told or ast.unparse(each.body[-1]) not in ("raise", f"raise {each.name}")
        ]
    if isinstance(node, ast.With):
        calls = [
            each.context_expr for each in node.items if isinstance(each.context_expr, ast.Call)
        ]
        kinds = [kind for call in calls if _label(call.func) == "suppress" for kind in call.args]
    named = {_label(part) for kind in kinds if kind is not None for part in ast.walk(kind)}
    return named | ({"Exception"} if None in kinds else set())


@cache
def _node(code: CodeType, instruction: int) -> tuple[ast.AST | None, _Parents]:
    """Return the node that an instruction belongs to, ``None`` if it is not known, and the parent
    of each node."""
    parents = _parents(code.co_filename) or {}
    position = next(islice(code.co_positions(), instruction // 2, None), (None,))
    found = [] if None in position else [each for each in parents if _span(each) == position]
    return (found[0] if found else None), parents


@cache
def _place(code: CodeType, instruction: int, line: int) -> Place:
    name = place_text(code, line)
    node, parents = _node(code, instruction)
    if node is None:
        return Place(name)
    if isinstance(node, ast.stmt):  # Python gives the jump of a test the place of its statement
        node = getattr(node, "test", node)
        while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node = node.operand
    statement = _statement(node, parents)
    place = Place(
        name,
        is_chosen_by=_is_chosen(node, parents),
        is_returned=isinstance(statement, ast.Return),
        compares=isinstance(node, ast.Compare | ast.MatchValue),
        compared_with=_turning_number(node, parents),
    )
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _ORDERS:
        return replace(place, is_settled=True)
    if isinstance(node, ast.Call) and (called := ast.unparse(node.func)).endswith(_FINITE):
        return replace(place, usual=called.endswith("isfinite"), is_settled=True)
    is_negated = False
    while (parent := parents[node]) is not None and not isinstance(parent, ast.stmt):
        if isinstance(parent, ast.IfExp) and node is parent.test and _chooses_a_number(parent):
            usual = isinstance(parent.orelse, ast.Constant)
            return replace(place, usual=usual != is_negated, is_settled=True)
        is_negated ^= isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
        node = parent
    if isinstance(parent, ast.Assert | ast.While) and node is parent.test:
        repeats = isinstance(parent, ast.While) and not _has_bound(parent)
        bounds = (*re.findall(r"<=? ([\w.]+)\)", ast.unparse(parent.test)),)
        usual = not is_negated
        return replace(place, usual=usual, is_settled=True, repeats=repeats, bounds=bounds)
    if isinstance(parent, ast.If):
        ends = [body[-1] if body else None for body in (parent.body, parent.orelse)]
        leaves = [isinstance(end, _LEAVES) or _fails(end) for end in ends]
        if leaves[0] != leaves[1]:
            raises = _fails(ends[leaves[1]])
            left = None if raises else _left_loop(parent, parents)
            waits = isinstance(left, ast.While)
            usual = leaves[1] != is_negated
            repeats = isinstance(left, ast.While) and not _has_bound(left, parent)
            place = replace(place, usual=usual, is_settled=raises or waits, repeats=repeats)
            is_end = isinstance(ends[leaves[1]], _ENDS)
            return replace(place, ends_range=is_end and _only_repeats(left))
        trains, others = (
            any(_TRAINS.search(ast.unparse(each)) for each in body)
            for body in (parent.body, parent.orelse)
        )
        if trains != others:  # a loss is not 0, and does not jump
            return replace(place, usual=trains != is_negated)
    if _only_tells(statement, parents):
        # What is best so far is saved, since it may be loaded; counters and flags stay as they are.
        told = ast.unparse(statement)
        counts = re.match(r"(?s)((?!el(se|if)\b).)*([-+]= |= True)", told)
        if counts is None or not _RUNS.search(told):
            return replace(place, usual=(counts is None) != is_negated, is_settled=True)
    return place


def _has_bound(loop: ast.While, asks: ast.If | None = None) -> bool:
    """Whether a counter ends a loop, too, as in ``while running.any() and steps < 12``, or in
    ``if len(frames) == 100: break``; ``asks`` is what else ends it."""
    within = [each for part in loop.body for each in ast.walk(part)]
    counters = {
        _label(each.target)
        for each in within
        if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add | ast.Sub)
    }
    for each in within:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.BinOp):  # t = t + 1
            counters |= {*map(_label, each.targets)} & {*map(_label, ast.walk(each.value))}
    counters.discard("")
    test = loop.test
    ends = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else []
    for each in within:
        if each is not asks and isinstance(each, ast.If) and isinstance(each.body[-1], _ENDS):
            ends = [*ends, each.test]
    return any(
        isinstance(end, ast.Compare)
        and any(
            _label(each) in counters or ast.unparse(each).startswith("len(")
            for each in (end.left, *end.comparators)
        )
        for end in ends
    )


def _only_repeats(loop: ast.AST | None) -> bool:
    """Whether this is a loop over a range that does not use its number."""
    if not (isinstance(loop, ast.For) and "range(" in ast.unparse(loop.iter)):
        return False
    used = {each.id for part in loop.body for each in ast.walk(part) if isinstance(each, ast.Name)}
    return isinstance(loop.target, ast.Name) and loop.target.id not in used


def _fails(statement: ast.stmt | None) -> bool:
    """Whether a statement always raises: ``raise``, ``assert False``, ``torch._assert(False, …)``."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        asserted = call.args[:1] if ast.unparse(call.func).endswith("assert") else []
    else:
        asserted = [statement.test] if isinstance(statement, ast.Assert) else []
    is_false = any(isinstance(each, ast.Constant) and not each.value for each in asserted)
    return is_false or isinstance(statement, ast.Raise)


def _chooses_a_number(choice: ast.IfExp) -> bool:
    """Whether both sides are numbers, as in ``loss.item() if count > 0 else 0.0``."""
    return all(
        isinstance(side, ast.Constant) or ast.unparse(side).endswith(".item()")
        for side in (choice.body, choice.orelse)
    )


def _turning_number(node: ast.AST, parents: _Parents) -> float | None:
    """Return a number that is not on the side of 0 of what the value at ``node`` is compared
    with."""
    for parent in _ancestors(node, parents):
        if isinstance(parent, ast.Compare):
            for operand in (parent.left, *parent.comparators):
                number = getattr(operand, "value", None)
                if isinstance(number, int | float):
                    is_exact = isinstance(parent.ops[0], ast.Eq | ast.NotEq) and number
                    return float(number if is_exact else 2 * abs(number) + 100)
            return None
    return None


@cache
def _parents(filename: str) -> _Parents | None:
    """Return the parent of each node of a file's code."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None
    parents: _Parents = {tree: None}
    for node in ast.walk(tree):
        parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
    return parents


def _span(node: ast.AST) -> tuple[int | None, ...]:
    names = ("lineno", "end_lineno", "col_offset", "end_col_offset")
    return tuple(getattr(node, name, None) for name in names)


def _ancestors(node: ast.AST, parents: _Parents) -> Iterator[ast.AST]:
    while (parent := parents[node]) is not None:
        yield parent
        node = parent


def _left_loop(node: ast.AST, parents: _Parents) -> ast.AST | None:
    """Return the loop or function that ``node`` ends."""
    kinds = (ast.While, ast.For, *_SCOPES)
    return next((each for each in _ancestors(node, parents) if isinstance(each, kinds)), None)


def _is_chosen(node: ast.AST, parents: _Parents) -> bool:
    """Whether a value that is read at ``node`` decides how the code goes on: in a test, or by the
    name that it gets."""
    names = _stored(_statement(node, parents)) - {""}
    if any(map(_is_no_choice, (node, *_ancestors(node, parents)))) or _only_tells(node, parents):
        return False
    for parent in _ancestors(node, parents):
        if isinstance(parent, _TESTS) and _deciding(parent, node) is node:
            return True
        node = parent
        if isinstance(parent, _SCOPES):
            tests = [each for each in ast.walk(parent) if isinstance(each, _TESTS)]
            return any(
                _label(each) in names
                and not (_is_no_choice(parents[each]) or _only_tells(each, parents))
                for test in tests
                for each in ast.walk(_deciding(test, test))
            )
    return False


def _only_tells(node: ast.AST, parents: _Parents) -> bool:
    """Whether a condition at ``node`` decides only what is told or saved, or counts rounds after which
    a loop ends: no name that follows from it is used otherwise in its file."""
    left = [_statement(node, parents)]
    for code in left:  # it grows
        told, around = getattr(code, "test", code), parents[code]
        stored = _stored(told)
        # A counter may end a loop, but no flag, and not the condition itself.
        is_counted = isinstance(getattr(around, "test", 0), ast.Compare) and around is not left[0]
        kinds = _TELLING if is_counted else _TELLING[2:]
        if not isinstance(code, kinds) or "" in stored or _ACTS.search(ast.unparse(told)):
            return False
        if isinstance(code, ast.If):
            left += code.body + code.orelse
        for each in parents:
            if isinstance(getattr(each, "ctx", 0), ast.Load) and _label(each) in stored:
                using = _statement(each, parents)
                left += [using] * (using not in left)
    return True


def _statement(node: ast.AST, parents: _Parents) -> ast.stmt:
    """The statement that ``node`` is in."""
    around = (node, *_ancestors(node, parents))
    return next(each for each in around if isinstance(each, ast.stmt))


def _stored(code: ast.AST) -> set[str]:
    """The names that code gives values to; one is empty where it changes an element."""
    return {
        _label(each) for each in ast.walk(code) if isinstance(getattr(each, "ctx", 0), ast.Store)
    }


def _label(node: ast.AST) -> str:
    """The name of a variable or an attribute; empty for anything else, such as an element."""
    return getattr(node, "id", getattr(node, "attr", ""))


def _is_no_choice(node: ast.AST | None) -> bool:
    """Whether a call asks for finite numbers, as all are, or for a type, or a slice is taken."""
    if isinstance(node, ast.Subscript):
        return any(isinstance(each, ast.Slice) for each in ast.walk(node.slice))
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith((*_FINITE, "isinstance"))


def _deciding(test: ast.AST, other: ast.AST) -> ast.AST:
    """The part of a test that decides: what is asked, or the index of an element; else ``other``."""
    parts = [getattr(test, name, None) for name in ("test", "subject", "slice")]
    return next((part for part in parts if part is not None), other)


class Decisions:
    """Decides each condition of a run.

    Args:
        assumptions: which conditions are not as usual.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self.assumptions = assumptions
        self._rounds: Counter[str] = Counter()
        self.places: dict[str, None] = {}
        """Places that decide how the code goes on, in order."""

    def decide(self, place: Place, usual: bool, *, is_likely: bool = False) -> bool:
        """Return what the condition at ``place`` is; it is ``usual`` where the code does not tell,
        or where that is likely."""
        if place.is_settled and not place.repeats:
            return usual if place.usual is None else place.usual
        if is_likely and (usual or place.usual is not None):
            return usual
        usual = usual if place.usual is None else place.usual
        if place.repeats:
            self._rounds[place.name] += 1
            return usual != (self._rounds[place.name] % (place.rounds + 1) == 0)
        self.places.setdefault(place.name)
        return usual != self.assumptions.reverse(place.name)


TraceScript = Callable[[Assumptions], TraceAnswer]
"""Traces the script with assumptions."""


def largest_answer(trace: TraceScript, end: float = inf) -> TraceAnswer:
    """Return the answer for a script, the largest of several where it branches on values of the GPU.

    Where it selects elements by values of the GPU, the expectation is that of half of them, and the
    bound that of all.

    Args:
        trace: traces the script.
        end: when all traces should be done, on the monotonic clock.

    Raises:
        ExtractError: as ``trace`` does with the usual conditions and all elements selected.
    """
    answer, assumptions = _over_branches(trace, end)
    if not answer.selections or answer.is_lower_bound:
        return answer
    where = "; ".join(answer.selections)
    try:
        half = trace(replace(assumptions, selected_share=0.5))
    except ExtractError as error:
        note = f"{where}: selects elements by values of the GPU; all count, because half of them end without a step: {error}."
        return replace(answer, notes=(*answer.notes, note))
    met = {each.name for each in half.phases}
    known = [each.requested_bytes for each in answer.phases if each.name in met]
    # Time may be up before an evaluation; a step that was not met is mostly like the others.
    unmet = [
        each
        for each in answer.phases
        if each.name not in met
        and (" of " not in each.name or each.requested_bytes > max(known, default=0))
    ]
    before = [each.name for each in unmet if each.requested_bytes > half.requested_bytes]
    # Less than half cannot follow from the share alone, if it came less far.
    is_less = half.requested_bytes < answer.requested_bytes / 2
    if is_less and max(each.step for each in half.phases) < answer.peak.step:
        before.append(f"step {answer.peak.step}")
    if before:
        note = f"{where}: selects elements by values of the GPU; all count, because with half of them time was up before {before[0]}."
        return replace(answer, notes=(*answer.notes, note))
    note = f"{where}: selects elements by values of the GPU; half of them are expected, and the safe bytes hold all."
    taken = (each for each in answer.notes if each.startswith(answer.selections))
    of_all = {each for each in taken if "was taken to" in each}
    return replace(
        half,
        phases=(*half.phases, *unmet),
        safe_bytes=max(half.safe_bytes, answer.safe_bytes),
        batches=answer.batches,
        max_batch_size=answer.max_batch_size,
        notes=(
            *(each for each in answer.notes if each not in of_all),
            *(each for each in half.notes if each.startswith("time was up") and not unmet),
            note,
        ),
        branches=answer.branches,
        selections=answer.selections,
    )


def _done(answer: TraceAnswer) -> set[str]:
    """Return what a script has done, of whichever batch."""
    return {each.name.partition(" of ")[0] for each in answer.phases}


def _over_branches(trace: TraceScript, end: float) -> tuple[TraceAnswer, Assumptions]:
    """Return the largest answer over the ways that the script can go, and its assumptions."""
    usual, opposite = USUAL, Assumptions(opposite=True)
    try:
        first = trace(usual)
    except CodeEndedError as error:  # a condition may be why, or a number
        with suppress(ExtractError):
            return trace(opposite), opposite
        for other, why in _AFTER_ERRORS.items():
            with suppress(ExtractError):
                answer = trace(other)
                return replace(answer, notes=(*answer.notes, f"{why}: {error}.")), other
        raise error from None
    met = _done(first)
    went_on = {each for each in first.notes if each.startswith(WENT_ON)}
    has_time = monotonic() < end
    is_suspect = went_on and has_time and any(_READ in each for each in first.notes)
    has_left = any(each.startswith(LEFT) for each in first.notes)
    for other, why in _AFTER_ERRORS.items():
        is_early = first.is_lower_bound and has_time
        is_due = first.error or (is_early if other is _PATIENT else is_suspect)
        if not is_due or (other is _PATIENT and not has_left):
            continue
        with suppress(ExtractError):  # perhaps of a number that cannot be
            further = trace(other)
            is_whole = met <= _done(further)
            # An error that is met either way does not follow from values.
            is_whole &= first.error != further.error or not went_on <= {*further.notes}
            gains = further.safe_bytes - first.safe_bytes
            is_more = gains > 0 or (gains == 0 and not further.error)
            if is_whole and (is_more or first.is_lower_bound > further.is_lower_bound):
                note = f"{why}{first.error and ': '}{first.error}."
                first = replace(further, notes=(*further.notes, note))
                usual, opposite = other, replace(other, opposite=True)
    if not first.branches or first.is_lower_bound:  # time is up
        return first, usual
    where = "; ".join(first.branches)
    found = {usual: first}
    try:
        found[opposite] = trace(opposite)
    except ExtractError as error:
        note = f"{where}: branches on values of the GPU; the other way (the opposite of each) ends without a step: {error}."
    else:
        note = ""
    places = list(dict.fromkeys(place for each in found.values() for place in each.branches))
    best = max(found, key=lambda each: (found[each].expected_bytes, not found[each].error))
    unseen = places if len(places) > 1 else []
    seconds = 0.0
    for place in unseen[:MOST_TRACES]:
        start = monotonic()
        if start + seconds > end:
            break
        unseen = unseen[1:]
        turned = replace(best, exceptions=(*best.exceptions, place))
        try:
            found[turned] = trace(turned)
        except ExtractError:
            continue
        if found[turned].expected_bytes > found[best].expected_bytes:
            best = turned
        seconds = monotonic() - start
    answer = found[best]
    if not note:
        others = [each.expected_bytes for way, each in found.items() if way != best]
        smaller = min(others) if others else answer.expected_bytes
        selected = ", if all elements are selected" if answer.selections else ""
        note = (
            f"{where}: branches on values of the GPU; both ways were traced, and this is the larger one "
            f"(the other: {smaller / MIB:,.0f} MiB expected{selected})."
        )
    notes = [note]
    if unseen:
        notes.append(
            f"{'; '.join(unseen)}: not traced the other way alone, only together with all other branches."
        )
    answer = replace(
        answer,
        safe_bytes=max(each.safe_bytes for each in found.values()),
        notes=(*answer.notes, *notes),
        branches=tuple(places),
    )
    return answer, best
