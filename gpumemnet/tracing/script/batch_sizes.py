"""Traces a script at several batch sizes, and finds what sets its batch size: an argument of its
command line, or constants in its code.

An argument is found by its name, which holds ``batch`` or is what the code passes on as
``batch_size``, and by its value, which is the number of samples that the model got. If no argument
is given, the script's ``add_argument`` calls are read for one with that default, then its code for
constants of that value with such a name, as in ``batch_size = 64`` or ``DataLoader(data,
batch_size=64)``.

Each run is a process of its own, forked before the script began.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from types import CodeType
from typing import Any, Final

from gpumemnet.errors import ExtractError, GpumemnetError
from gpumemnet.extract.factory import compile_file
from gpumemnet.sandbox.user_code import fault_sentence
from gpumemnet.tracing.api import ExtraResults
from gpumemnet.tracing.model_tracer import BatchMemory, BatchTraces
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.tracing.script.run import ScriptCall, ScriptRun, result_of_script, run_script

_OPTION: Final = "--batch-argument"
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_SHORT: Final = frozenset({"-b", "-bs"})


@dataclass(frozen=True, slots=True)
class BatchSetting:
    """What sets the batch size.

    Attributes:
        name: the argument, such as ``--batch-size``; empty for constants in the code.
        value: its value in the run that was traced.
        lines: lines of the constants.
    """

    name: str
    value: int
    lines: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """What other batch sizes were set by."""
        where = self.name or f"constants on line {', '.join(map(str, self.lines))}"
        return f"other batch sizes were set by {where} ({self.value:,} here)"

    def arguments(self, given: Sequence[str], batch_size: int) -> list[str]:
        """Return the script's arguments for another batch size."""
        if not self.name:
            return list(given)
        places = [place for place in _values(given) if place.name == self.name]
        if not places:
            return [*given, self.name, str(batch_size)]
        changed = list(given)
        for place in places:
            changed[place.index] = f"{place.prefix}{batch_size}"
        return changed

    def code(self, file: Path, batch_size: int) -> CodeType:
        """Return the script's code for another batch size.

        Raises:
            ExtractError: it cannot be read, or is no Python.
        """
        if self.name:
            return compile_file(file)
        tree = ast.parse(file.read_bytes())
        for constant in _constants(tree, self.value):
            constant.value = batch_size
        return compile(tree, str(file), "exec")


def find_setting(
    file: Path, arguments: Sequence[str], batch_size: int, name: str | None = None
) -> BatchSetting:
    """Return what sets the batch size of a script.

    Args:
        file: the script.
        arguments: its arguments.
        batch_size: samples that its model got.
        name: the argument that sets it, if the user names one; it may count other things than
            samples of one step.

    Raises:
        ExtractError: says what was found, and how to name the argument.
    """
    tree = ast.parse(file.read_bytes())
    given, defaults = (
        {place.name: place.value for place in _values(arguments)},
        dict(_defaults(tree)),
    )
    if name is not None:
        value = given.get(name, defaults.get(name))
        if value is None:
            raise ExtractError(
                f"{_OPTION}: the value of {name} is unknown: give it among the script's arguments"
            )
        return BatchSetting(name, value)
    sources = _sources(tree)
    known = {
        each: value
        for each, value in (defaults | given).items()
        if "batch" in each.lower()
        or each in _SHORT
        or each.lstrip("-").rpartition(".")[2].replace("-", "_") in sources
    }
    fitting = [each for each, value in known.items() if value == batch_size]
    fitting = [each for each in fitting if each in given] or fitting
    if len(fitting) == 1:
        return BatchSetting(fitting[0], batch_size)
    constants = _constants(tree, batch_size)
    if constants and not fitting:
        return BatchSetting(
            "", batch_size, tuple(sorted({constant.lineno for constant in constants}))
        )
    found = ", ".join(f"{each} {value:,}" for each, value in known.items()) or "none"
    raise ExtractError(
        f"{_OPTION}: name the argument that sets the batch size: "
        f"the model got batches of {batch_size:,}, and arguments of the script that may set them are: {found}"
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a number stands among the arguments: ``prefix`` comes before it in the same word."""

    index: int
    name: str
    prefix: str
    value: int


def _values(arguments: Sequence[str]) -> Iterator[_Place]:
    """Yield the arguments with whole numbers: ``--name 8``, ``--name=8`` and ``name=8``."""
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if equals and _NUMBER.fullmatch(value):
            yield _Place(index, name, f"{name}=", int(value))
        elif (
            _NUMBER.fullmatch(word)
            and index
            and arguments[index - 1].startswith("-")
            and "=" not in arguments[index - 1]
        ):
            yield _Place(index, arguments[index - 1], "", int(word))


def _defaults(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers that ``add_argument`` calls give as defaults, by the longest name of
    the argument."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            names = [
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
            for keyword in node.keywords:
                if keyword.arg == "default" and names and _is_number(keyword.value):
                    yield max(names, key=len), ast.literal_eval(keyword.value)


def _sources(tree: ast.Module) -> set[str]:
    """Return the names that a ``batch_size`` is made of where the code passes one on, as ``bs`` in
    ``DataLoader(data, batch_size=args.bs)``; names of variables are followed to what they are
    assigned."""
    assigned: dict[str, ast.expr] = {}
    passed: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            assigned.update({ast.unparse(target): node.value for target in node.targets})
        elif isinstance(node, ast.keyword) and "batch_size" in (node.arg or ""):
            passed.append(node.value)
    found: set[str] = set()
    while passed:
        for node in ast.walk(passed.pop()):
            name = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
            if isinstance(name, str) and name not in found:
                found.add(name)
                passed += [assigned[name]] if name in assigned else []
    return found


def _constants(tree: ast.Module, value: int) -> list[ast.Constant]:
    """Return the constants of this value that are called a batch: variables, fields, defaults and
    keyword arguments."""
    named: list[tuple[str, ast.expr | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            named += [(ast.unparse(target), node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            named.append((ast.unparse(node.target), node.value))
        elif isinstance(node, ast.keyword):
            named.append((node.arg or "", node.value))
        elif isinstance(node, ast.arguments):
            parameters = [*node.posonlyargs, *node.args]
            defaults = node.defaults
            named += [
                (p.arg, d)
                for p, d in zip(
                    parameters[len(parameters) - len(defaults) :], defaults, strict=True
                )
            ]
            named += [(p.arg, d) for p, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    return [
        each
        for name, each in named
        if "batch" in name.lower()
        and isinstance(each, ast.Constant)
        and _is_number(each)
        and each.value == value
    ]


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


_LOG: Final = logging.getLogger("gpumemnet.tracing")


def trace_batches(
    call: ScriptCall, extras: ExtraResults, batch_argument: str | None
) -> TraceAnswer:
    """Return the memory of a script, and that at other batch sizes.

    Args:
        call: the script.
        extras: which batch sizes, and whether to find the largest one that fits.
        batch_argument: the script's argument that sets its batch size; found by its name and value
            if ``None``.

    Raises:
        ExtractError: a run cannot be traced, or nothing is found that sets the batch size.
    """
    own = in_fork(lambda: run_script(call))
    setting = find_setting(own.file, call.arguments, own.batch_size, batch_argument)
    traces = BatchTraces(
        lambda size: _run_at(call, own, setting, size, batch_argument).timeline,
        setting.value,
        own.timeline,
    )
    for size in {min(extras.batches), max(extras.batches)} if extras.batches else ():
        traces.exact(size)  # what lies between is interpolated, and nothing is extrapolated
    memory = BatchMemory(traces, call.platform.device, own.settings)
    answer = result_of_script(own, call, extras.curve)
    return replace(
        answer,
        batches=tuple(memory.point(size) for size in extras.batches),
        max_batch_size=memory.largest() if extras.max_batch else None,
        notes=(*answer.notes, f"{setting.sentence}."),
    )


def _run_at(
    call: ScriptCall, own: ScriptRun, setting: BatchSetting, size: int, batch_argument: str | None
) -> ScriptRun:
    """Run the script with another batch size."""
    _LOG.info("running up to the second step at batch size %d", size)
    changed = replace(
        call,
        arguments=tuple(setting.arguments(call.arguments, size)),
        compiled=lambda file: setting.code(file, size),
    )
    try:
        run: ScriptRun = in_fork(lambda: run_script(changed))
    except ExtractError as error:
        raise type(error)(f"at batch size {size:,}: {error}") from error
    if batch_argument is None and run.batch_size != size:
        raise ExtractError(
            f"--batch-argument: {setting.sentence}, but with {size:,} the model got batches of {run.batch_size:,}: "
            "name the argument that sets the batch size"
        )
    return run


def in_fork(compute: Callable[[], Any]) -> Any:
    """Return what ``compute`` returns in a forked process, which ends at once.

    Raises:
        ExtractError: the process ended without a result.
        GpumemnetError: as ``compute`` does.
    """
    here, there = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            outcome: Any = compute()
        except GpumemnetError as error:
            outcome = error
        except BaseException as error:  # the process must not go on as a copy of its parent
            outcome = ExtractError(fault_sentence(error))
        there.send(outcome)
        there.close()
        os._exit(0)
    there.close()
    try:
        outcome = here.recv()
    except EOFError:
        outcome = ExtractError("the process that ran the script ended without an answer")
    os.waitpid(child, 0)
    if isinstance(outcome, GpumemnetError):
        raise outcome
    return outcome
