"""How the run of a script ends: with its code, an error, enough steps or the deadline, and what is
said of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpumemnet.errors import CodeEndedError, ExtractError, GpumemnetError
from gpumemnet.launchers.launch_line import launcher_remedy
from gpumemnet.sandbox.process import DeadlineReached, stop_alarm
from gpumemnet.sandbox.user_code import (
    UnknownValueError,
    fault_sentence,
    user_calls,
    user_location,
)
from gpumemnet.tracing.script.branches import USUAL
from gpumemnet.tracing.script.libraries import COMPILED
from gpumemnet.tracing.script.models import GENERATION
from gpumemnet.tracing.script.observer import EnoughSteps, ScriptObserver
from gpumemnet.tracing.script.optimizers import counted
from gpumemnet.tracing.script.read_values import ReadValues
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from gpumemnet.tracing.script.run import ScriptCall


def run_to_end(
    run: Callable[[], None],
    observer: ScriptObserver,
    values: ReadValues,
    call: Callable[[], ScriptCall],
) -> None:
    """Run a script, or a process of it, and note how it has ended.

    Args:
        run: runs it.
        observer: observes it.
        values: what it reads from the GPU.
        call: returns how it is run, which a later request may change.

    Raises:
        CodeEndedError: it ended before it had trained, perhaps by a value that it has read.
        ExtractError: an error ended it before.
        DeadlineReached: time was up before anything was on the GPU.
    """
    ended = ""
    try:
        _run_to_stop(run)
        observer.loops.learn_queues()  # the script may have emptied some
        # It has come to its own end, and no loader has ended early.
        if not (observer.progress.has_trained or observer.progress.is_cut()):
            observer.counters.waiting.clear()
            observer.counters.sizes.clear()
    except EnoughSteps as error:
        _note_running(observer, error)
    except GpumemnetError as error:
        if observer.first is None:
            raise
        _note_running(observer, error)
        observer.error = str(error)
    except DeadlineReached as error:
        stop_alarm()
        _note_running(observer, error)
        if not observer.progress.has_trained and not _reach_deadline(observer, user_calls(error)):
            raise
    except SystemExit as error:
        ended = f"{user_location(error)}: sys.exit({error.code!r})"
        if error.code and isinstance(error.__context__, Exception):  # such as of Hydra
            ended = observer.error = fault_sentence(error.__context__)
    except Exception as error:
        if observer.first is None and not observer.loops.left:
            failure = CodeEndedError if values.sentences else ExtractError
            raise failure(
                f"the script cannot be traced: {fault_sentence(error)}{_remedy(error, call())}"
            ) from error
        _note_running(observer, error)
        if not isinstance(error, StopIteration):  # of a loader that has ended early
            ended = observer.error = fault_sentence(error)
    if observer.error:
        is_cut = observer.loaders.known or observer.progress.has_trained
        cut = "the trace ends loops and data loaders early; perhaps by that, "
        observer.notes["error"] = (
            f"{cut if is_cut else ''}an error ended the script, and what follows is not in the answer: "
            f"{observer.error}"
        )
    if observer.has_enough_steps:
        return
    if observer.loops.left and not (observer.has_stepped or observer.trains_on_host):
        _take_lower_bound(observer, "the script did not train once it had left loops")
    if observer.has_stepped:
        observer.recorder.end_steps()
        observer.recorder.close()
    # Where a condition is not as usual, it may be why nothing is trained.
    elif observer.is_lower_bound and call().assumptions == USUAL:
        observer.recorder.take_all_as_step()
    else:
        raise CodeEndedError(f"{_missing(observer)}{ended and f'; it ended at {ended}'}")
    if not observer.is_lower_bound:
        observer.notes["steps"] = (
            f"the script ended after {counted(observer.boundaries)}: longer training can take more, "
            "where gradients and optimizer state of a step are there in the next one"
        )


def _run_to_stop(run: Callable[[], None]) -> None:
    """Run the script; an error that follows from the end of the trace, such as of a context that is
    left, is that end.

    Raises:
        EnoughSteps, DeadlineReached: the trace ended.
        Exception: of the script.
    """
    try:
        run()
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, EnoughSteps | DeadlineReached):
            cause = cause.__context__
        if cause is None:
            raise
        raise cause from None


def _remedy(error: BaseException, call: ScriptCall) -> str:
    """Return what to do about an error of a script, as the end of a sentence; empty if that is not
    known."""
    words = [*(["-m"] if call.is_module else []), str(call.script), *call.arguments]
    if remedy := launcher_remedy(error, words):
        return remedy
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in sys.modules:
            return f"; it is a part of another version of {package!r}"
        remedy = f"; install what provides {package!r} where gpumemnet is installed"
        if "cuda" in package or package.endswith(("_ext", "_C")):  # compiled for a GPU
            remedy += f"; {COMPILED}"
        return remedy
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return (
            f"; the trace runs in {Path.cwd()}: start it where the training is started, with the data in place "
            "(a few made-up samples of the same sizes will do)"
        )
    if isinstance(error, EOFError) and "reading a line" in str(error):
        return "; give the lines that it asks for: printf 'y\\n' | gpumemnet trace …"
    asked, names_gpus, _ = str(error).partition("But your machine only has")  # of Lightning
    if names_gpus:
        return f"; trace it as the first of these GPUs: --ranks {asked.count(',') + 1}"
    if isinstance(error, UnknownValueError):
        return "; let the script leave out this part, by its own arguments if it has some: it does not train"
    return ""


def _reach_deadline(observer: ScriptObserver, calls: str) -> bool:
    """Take what was seen so far, because time is up; return whether anything was on the GPU.

    Args:
        calls: those of the script that ran.
    """
    if observer.has_enough_steps:
        observer.notes["deadline"] = (
            f"time was up after {counted(observer.optimizers.steps)}{calls and f', at {calls}'}: "
            "what the script does later was not looked at"
        )
        return True
    return _take_lower_bound(
        observer,
        f"the deadline was reached after {counted(observer.optimizers.steps)}, and this is the memory of what "
        "ran until then; raise --deadline, or let the script do less before it trains (fewer evaluation batches, "
        f"shorter generation){calls and f'; it was at {calls}'}",
    )


def _take_lower_bound(observer: ScriptObserver, why: str) -> bool:
    """Take what was seen so far for a lower bound; return whether anything was on the GPU."""
    observer.is_lower_bound = observer.recorder.has_live_storages
    observer.notes["deadline"] = f"a lower bound: {why}"
    return observer.is_lower_bound


def _note_running(observer: ScriptObserver, error: BaseException) -> None:
    """Note the calls that the trace ended in, if a library trains, and loops whose rounds make
    optimizers."""
    observer.held = [*observer.optimizers]  # the script's frames go with the error
    observer.loops.learn_queues()
    observer.comes_again = observer.loops.starts_again()
    if observer.has_enough_steps and observer.recorder.phase == GENERATION:
        observer.notes[GENERATION] = observer.generation.sentence
    calls = user_calls(error)
    is_error = isinstance(error, Exception) and not isinstance(error, StopIteration)
    is_enough = observer.progress.has_trained and not is_error
    if calls and (observer.loaders.is_over is not None or is_enough):
        observer.notes["calls"] = (
            f"the trace ended within {calls}: what the script does after it is not in the answer"
        )
    if observer.loops.making:
        observer.notes["loops"] = (
            f"{', '.join(sorted(observer.loops.making))}: each round makes an optimizer, and the trace ended within; "
            "a larger network of a later round takes more"
        )
        if (left := max(observer.loops.making.values())) >= MIB:
            observer.notes["loops"] += (
                f"; the last round left {left / MIB:,.1f} MiB more than any before"
            )
    if later := [*observer.loops.time_is_up()]:
        observer.notes["later"] = (
            "the trace ended within loops whose rounds leave as much each time, "
            f"and what later ones leave is in the answer: {'; '.join(later)}"
        )


def _missing(observer: ScriptObserver) -> str:
    """What a script did not do that ended before it had trained enough, as a sentence."""
    steps = observer.optimizers.steps
    if observer.trains_on_host:
        return (
            f"the model never left the CPU: {counted(steps)} ran there; "
            "let the script train on the GPU (model.to('cuda')), by its own arguments if it has some"
        )
    if not steps and not observer.recorder.now():
        return "the script ended before anything was on the GPU and before any optimizer stepped"
    if not steps:
        return (
            "the script ended, and no optimizer stepped on what is on the GPU; "
            "a trace takes two steps of an optimizer of torch.optim, or of a class derived from torch.optim.Optimizer"
        )
    return f"the script ended after {counted(steps)}, and no step was complete"
