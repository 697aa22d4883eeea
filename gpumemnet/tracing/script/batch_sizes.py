"""Traces a script at several batch sizes, and finds what sets its batch size: an argument of its
command line, constants in its code, or where the number is met as it runs.

An argument is found by its name, which holds ``batch``, and by its value, which is the number of
samples that the model got.  If none is given, the number is changed wherever a parser of arguments,
or a file of YAML or JSON, has it under such a name, and where data loaders are made with it.
Constants in the code with such a name and value, as in ``batch_size = 64``, are changed if no parser
or file has the number.

Each run is a process of its own, forked before the script began.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gpumemnet.errors import ExtractError, GpumemnetError
from gpumemnet.sandbox.user_code import fault_sentence
from gpumemnet.tracing.api import ExtraResults
from gpumemnet.tracing.model_tracer import BatchMemory, point_of
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.tracing.script.run import ScriptCall, run_script
from gpumemnet.tracing.script.script_run import ScriptRun, result_of_script
from gpumemnet.units import MIB

_OPTION: Final = "--batch-argument"
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_SHORT: Final = frozenset({"-b", "-bs"})


@dataclass(frozen=True)
class BatchSetting:
    """What sets the batch size.

    Attributes:
        name: the argument, such as ``--batch-size``; empty for others.
        value: its value in the run that was traced.
        lines: lines of constants in the code; empty for what is changed as the script runs.
    """

    name: str
    value: int
    lines: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """What other batch sizes were set by."""
        where = self.name or "its arguments, configuration files and data loaders"
        if self.lines:
            where = f"constants on line {', '.join(map(str, self.lines))}"
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

    def change(self, tree: ast.Module, batch_size: int) -> ast.Module:
        """Return the script's code, changed to another batch size."""
        for constant in _constants(tree, self.value) if self.lines else ():
            constant.value = batch_size
        return tree


def find_setting(
    file: Path,
    arguments: Sequence[str],
    batch_size: int,
    name: str | None = None,
    met: Mapping[int, bool] = MappingProxyType({}),
) -> BatchSetting:
    """Return what sets the batch size of a script.

    Args:
        file: the script.
        arguments: its arguments.
        batch_size: samples that its model got.
        name: the argument that sets it, if the user names one; it may count other things than
            samples of one step.
        met: batch sizes that were met as it ran → whether under a name, not in a data loader alone.

    Raises:
        ExtractError: says what was found, and how to name the argument.
    """
    tree = ast.parse(file.read_bytes())
    given = {place.name: place.value for place in _values(arguments)}
    if name is not None:
        value = given.get(name)
        if value is None:
            raise ExtractError(
                f"{_OPTION}: the value of {name} is unknown: give it among the script's arguments"
            )
        return BatchSetting(name, value)
    known = {
        each: value for each, value in given.items() if "batch" in each.lower() or each in _SHORT
    }
    fitting = [each for each, value in known.items() if value == batch_size]
    if len(fitting) == 1:
        return BatchSetting(fitting[0], batch_size)
    constants = [] if met.get(batch_size) else _constants(tree, batch_size)
    if constants and not fitting:
        return BatchSetting(
            "", batch_size, tuple(sorted({constant.lineno for constant in constants}))
        )
    if batch_size in met:
        return BatchSetting("", batch_size)
    found = ", ".join(f"{each} {value:,}" for each, value in known.items()) or "none"
    raise ExtractError(
        f"{_OPTION}: name the argument that sets the batch size: "
        f"the model got batches of {batch_size:,}, and arguments of the script that may set them are: {found}"
    )


@dataclass(frozen=True)
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
            last = reversed([*node.posonlyargs, *node.args])  # have the defaults
            pairs = [
                *zip(last, reversed(node.defaults), strict=False),
                *zip(node.kwonlyargs, node.kw_defaults, strict=True),
            ]
            named += [(parameter.arg, default) for parameter, default in pairs]
    return [
        each
        for name, each in named
        if "batch" in name.lower()
        and isinstance(each, ast.Constant)
        and type(each.value) is int
        and each.value == value
    ]


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
    own: ScriptRun = in_fork(lambda: run_script(call))
    setting = find_setting(
        own.file, call.arguments, own.batch_size, batch_argument, own.batch_sizes
    )

    @cache
    def run_at(size: int) -> ScriptRun:
        return own if size == setting.value else _run_at(call, setting, size, batch_argument)

    @cache
    def answer_at(size: int) -> TraceAnswer:
        return result_of_script(run_at(size), extras.curve)

    answer, largest = answer_at(setting.value), None
    others = ((size, answer_at(size)) for size in extras.batches)
    if extras.max_batch:
        memory = BatchMemory(lambda size: run_at(size).timeline, call.platform.device, own.settings)
        largest = memory.largest(setting.value)
        if answer.expected_bytes - memory.exact(setting.value).expected_bytes >= MIB:
            largest = _largest(answer_at, largest, setting.value)
    return replace(
        answer,
        batches=tuple(point_of(size, other, other.verdict) for size, other in others),
        max_batch_size=largest,
        notes=(*answer.notes, f"{setting.sentence}."),
    )


def _largest(answer_at: Callable[[int], TraceAnswer], most: int, own_size: int) -> int:
    """Return the largest batch size whose whole run fits, at most ``most``, where the peak is not in
    the first steps: on the line through the run's own size and twice that, or below."""
    own, twice = answer_at(own_size), answer_at(2 * own_size)
    each_bytes = max(1, (twice.safe_bytes - own.safe_bytes) // own_size)
    size = min(most, own_size + (own.available_bytes - own.safe_bytes) // each_bytes)
    while size > 0 and not answer_at(size).fits:
        over_bytes = answer_at(size).safe_bytes - own.available_bytes
        size -= max(1, over_bytes // each_bytes)
    return max(size, 0)


def _run_at(
    call: ScriptCall, setting: BatchSetting, size: int, batch_argument: str | None
) -> ScriptRun:
    """Run the script with another batch size."""
    _LOG.info("running up to the second step at batch size %d", size)
    changed = replace(
        call,
        arguments=tuple(setting.arguments(call.arguments, size)),
        change=lambda tree: setting.change(tree, size),
        resized=None if setting.name or setting.lines else (setting.value, size),
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
