"""Runs a training script up to its second optimizer step, and returns the memory of that run.

A script may choose settings of the caching allocator itself, read where and when PyTorch reads
them: from the environment when the allocator is first used, so a script may still set it in its
first lines.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.fx import traceback as fx_traceback

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.allocator.settings import parse_settings, settings_text
from gpumemnet.atomic_files import Document
from gpumemnet.errors import CodeEndedError, ExtractError, GpumemnetError, InvalidRequestError
from gpumemnet.extract.factory import compile_file
from gpumemnet.extract.placement import KnownValues, launches_do_nothing
from gpumemnet.launchers.launch_line import (
    VISIBLE,
    VISIBLE_ON_LINE,
    local_ranks,
)
from gpumemnet.launchers.pipeline_stages import StageFolder
from gpumemnet.launchers.processes import as_rank, processes_inherit_gpu, threads_inherit_modes
from gpumemnet.launchers.programs import stopped_by_answer
from gpumemnet.sandbox.checkpoint import Checkpoint, is_own_process, take_process
from gpumemnet.sandbox.process import stop_alarm
from gpumemnet.torch_private.names import (
    check_torch,
    declare_torchvision_operators,
    replaced,
    seen_within_operators,
    value_of,
    without_function_modes,
)
from gpumemnet.torch_private.script import ALLOCATOR_SETTINGS, WITHOUT_MODES
from gpumemnet.torch_private.training import without_dynamo
from gpumemnet.tracing.operators.autocast import cuda_kernels
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.tracing.script.branches import USUAL, Assumptions
from gpumemnet.tracing.script.gpu import GpuRequests
from gpumemnet.tracing.script.libraries import prepared
from gpumemnet.tracing.script.models import TrainedModel
from gpumemnet.tracing.script.observer import EnoughSteps, ScriptObserver
from gpumemnet.tracing.script.present_gpu import present_gpu
from gpumemnet.tracing.script.read_values import ReadValues
from gpumemnet.tracing.script.run_end import run_to_end
from gpumemnet.tracing.script.script_run import ScriptRun, result_of_script, shown_run
from gpumemnet.tracing.script.simulated_cuda import GPU

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
            chosen = (ALLOCATOR_SETTINGS, self._choose)
            limited = ("torch.cuda:set_per_process_memory_fraction", self._limit)
            with replaced([chosen, limited]):
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


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """A script, and how it is run.

    Attributes:
        script: a file with a training loop, or the dotted name of a module.
        arguments: command-line arguments of the script.
        platform: the GPU that the script sees.
        settings: settings of the caching allocator, unless the script chooses its own.
        is_module: whether it is a module, to be run as by ``python -m``.
        ranks: number of GPUs that the script is started on by ``torchrun``; ``None`` if it is
            started alone.
        assumptions: which conditions on values of the GPU are not as usual.
        continued: returns the call for a later request, which goes on from the first one's
            checkpoint.
        more_seconds: longest time for the whole run after the first steps.
        change: returns the code of the script's file, changed.
        resized: a batch size of arguments, configuration files and data loaders, and the one to put
            in its place.
        report, failed: called in a process that the script has forked, with the answer for it, or
            with why there is none.
        seen: called with the answer for what was seen so far, in a program that may never end.
        program: runs in the place of the script's code.
        rank: which of the ranks it is.
        stages: what the ranks of a pipeline tell each other.
        trained: takes the model that the script trains out of the run, if it is wanted.
    """

    script: Path
    arguments: tuple[str, ...]
    platform: Platform
    settings: AllocatorSettings
    is_module: bool = False
    ranks: int | None = None
    assumptions: Assumptions = USUAL
    continued: Callable[[Document], ScriptCall] | None = None
    more_seconds: float = 20.0
    change: Callable[[ast.Module], ast.Module] = lambda tree: tree
    resized: tuple[int, int] | None = None
    report: Callable[[TraceAnswer], None] = lambda answer: None
    failed: Callable[[GpumemnetError], None] = lambda error: None
    seen: Callable[[TraceAnswer], None] | None = None
    program: Callable[[], None] | None = None
    rank: int = 0
    stages: StageFolder | None = None
    trained: TrainedModel | None = None


def run_script(call: ScriptCall) -> ScriptRun:
    """Run a script in this process, which should be a child process, and return what it has shown.

    It stops after two optimizer steps, three if it has several optimizers.

    Raises:
        CodeEndedError: the script ended before it had trained for two steps on the GPU; says how
            far it came.
        ExtractError: names what cannot be traced and the line of the script.
    """
    torch_notes = check_torch()
    declare_torchvision_operators()
    take_process()
    gc.freeze()  # PyTorch's objects stay: each collection would look at all of them

    def continues(request: Document) -> None:
        nonlocal call
        torch.set_num_threads(1)  # those of the process that it is forked from are not here
        if call.continued is not None:
            call = call.continued(request)
        observer.more_seconds = call.more_seconds
        known.numbers.makes_up = call.assumptions.makes_up

    def assumed() -> Assumptions:
        checkpoint.reach()
        return call.assumptions

    checkpoint = Checkpoint(continues, is_wanted=call.continued is not None)
    values = ReadValues(assumed)
    allocator = AllocatorChoice(call.settings, values.note_once)
    known = KnownValues(values, limited=lambda tensor: observer.device_of(tensor) == GPU)
    known.numbers.makes_up = call.assumptions.makes_up
    observer = ScriptObserver(
        call.platform,
        known.run,
        call.more_seconds,
        call.resized,
        allocator.first_used,
        call.trained,
        checkpoint.reach,
    )
    values.is_still = observer.counters.is_still
    observer.loops.is_patient = lambda: assumed().is_patient
    observer.loops.has_read = lambda: bool(values.sentences)
    observer.recorder.begin("build")
    file = call.script

    def observed(run: Callable[[], None]) -> ScriptRun:
        """Run the script, or a process of it, and return what it has shown."""
        run_to_end(run, observer, values, lambda: call)
        return shown()

    def shown() -> ScriptRun:
        return shown_run(
            call.script, file, call.platform, observer, values, allocator.settings, torch_notes
        )

    def seen() -> None:
        """Answer for what was seen so far, outside of the modes: a worker of Ray waits for further
        tasks once it has trained, and goes on after any error."""
        if call.seen is not None:
            with patch.dict(values.sentences), without_function_modes(), value_of(WITHOUT_MODES)():
                call.seen(result_of_script(shown()))

    observer.seen = seen

    def trace_process(run: Callable[[], None]) -> None:
        if observer.first is not None:  # what is forked once the GPU is used cannot use it
            return run()
        try:
            call.report(result_of_script(observed(run)))
        except CodeEndedError:  # it has not trained, and is no part of the answer
            pass
        except GpumemnetError as error:
            call.failed(error)
            raise

    def stop() -> None:
        if not observer.recorder.has_live_storages:
            raise EnoughSteps

    def run_file() -> None:
        nonlocal file
        with (
            checkpoint.watching(),
            allocator.choosing(),
            stopped_by_answer(stop, call.more_seconds),
        ):
            module = _main_module(call.script, call.is_module)
            file = Path(str(module.__file__))
            requests = GpuRequests(observer, values, known)
            _run(module, call, observer, requests, trace_process)

    try:
        return observed(run_file)
    except CodeEndedError as error:
        is_on_host = observer.trains_on_host and not observer.recorder.now()
        if (values.sentences and not is_on_host) or call.seen is not None:  # a program's own end
            raise
        raise ExtractError(str(error)) from error  # no value is why: it would end so again


def _main_module(script: Path, is_module: bool) -> ModuleType:
    """Return the module ``__main__`` of a script, or of a module as ``python -m`` runs it, and put
    its folder on the path.

    Raises:
        ExtractError: there is no such module.
    """
    module = ModuleType("__main__")
    if not is_module:
        sys.path.insert(0, str(script.parent))
        module.__file__ = str(script)
        return module
    sys.path.insert(0, str(Path.cwd()))
    name, spec = str(script), None
    path: Any = None
    packages = [*accumulate(name.split("."), "{}.{}".format)]
    for package in packages:
        spec = _found(package, path) if path is not None or package == packages[0] else None
        path = None if spec is None else spec.submodule_search_locations
    if path is not None:
        spec = _found(f"{name}.__main__", path)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ExtractError(f"there is no module {name} to run in {Path.cwd()}, or on PYTHONPATH")
    module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
    return module


def _found(name: str, path: Any) -> ModuleSpec | None:
    """Find a module as an import does, but import no package that it is in."""
    if (loaded := sys.modules.get(name)) is not None:
        return loaded.__spec__
    finders = (getattr(each, "find_spec", None) for each in sys.meta_path)
    parent = ModuleType(name.rpartition(".")[0])
    parent.__path__ = path
    # A folder that is no package asks its parent where it is.
    with patch.dict(sys.modules, {parent.__name__: parent} if path is not None else {}):
        spec = next(filter(None, (find(name, path, None) for find in finders if find)), None)
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = [*spec.submodule_search_locations]
    return spec


def _run(
    module: ModuleType,
    call: ScriptCall,
    observer: ScriptObserver,
    requests: GpuRequests,
    traced: Callable[[Callable[[], None]], None],
) -> None:
    file, platform = str(module.__file__), call.platform
    code = compile_file(Path(file), lambda tree: observer.loops.changed(call.change(tree), file))
    sys.modules["__main__"] = module
    sys.argv = [file, *call.arguments]
    values, gpus = requests.values, local_ranks(call.ranks or 1)
    end = os._exit  # a process that the script forked ends at once
    torch.cuda.is_available()  # CUDA reads which GPUs it may use once: none
    numbers = ",".join(map(str, range(gpus)))
    if call.ranks is None:
        numbers = os.environ.get(VISIBLE_ON_LINE) or numbers
    with (
        patch.dict(os.environ, {VISIBLE: numbers}),
        patch.object(os, "_exit", lambda code: sys.exit(code) if is_own_process() else end(code)),
        without_dynamo(),
        # Anomaly mode asks for it at each operator, which takes most of the time.
        patch.object(fx_traceback, "format_stack", list),
        launches_do_nothing(before_import=True),
        requests,
        seen_within_operators(requests),
        cuda_kernels(platform),
        present_gpu(platform, observer, values, requests, gpus),
        prepared(call.stages.preparations() if call.stages is not None else {}),
        observer.observing(),
        observer.loops.watching(),
        observer.recorder,
        as_rank(
            call.ranks,
            observer.recorder,
            observer.streams,
            observer.sharded_tensor,
            values.note_once,
            call.rank,
            call.stages,
        ),
        processes_inherit_gpu(traced),
        threads_inherit_modes(EnoughSteps),
    ):
        try:
            if call.program is not None:
                call.program()
            else:
                if module.__package__:  # which python -m imports before, too
                    importlib.import_module(module.__package__)
                exec(code, module.__dict__)  # noqa: S102 - running the user's script is the purpose
        finally:
            if observer.first is not None:  # what follows needs no deadline, and must be whole
                stop_alarm()
