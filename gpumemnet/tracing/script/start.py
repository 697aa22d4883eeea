"""Starts the trace of a training script: :func:`trace_script` runs the script in a child process.

This module loads no torch, so the command line uses it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.atomic_files import (
    Document,
    from_json,
)
from gpumemnet.errors import ExtractError
from gpumemnet.extract.factory import existing_file
from gpumemnet.job.layers import check_count
from gpumemnet.job.training_job import MAX_RANKS
from gpumemnet.launchers.launch_line import VISIBLE, VISIBLE_ON_LINE, Launch
from gpumemnet.launchers.pipeline_stages import StageFolder, peaks_by_rank
from gpumemnet.launchers.programs import Programs, inheriting
from gpumemnet.sandbox.process import NO_COMPILING, asking
from gpumemnet.tracing.api import (
    DEADLINE_SECONDS,
    DEFAULT_OPTIONS,
    PURPOSE,
    TraceRequest,
    checked_request,
    request_from_dict,
)
from gpumemnet.tracing.result import TraceAnswer, answer_from_dict, answer_to_dict
from gpumemnet.tracing.script.branches import SECONDS, USUAL, Assumptions, largest_answer
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from gpumemnet.tracing.script.run import ScriptCall

_LOG: Final = logging.getLogger("gpumemnet.tracing")
_LATE: Final = 8
"""Step after which a peak is late: the batches that loaders choose come before."""
_LEAST_SECONDS: Final = 2.0
"""Shortest time for the whole run after the first steps."""


def trace_script(
    launch: Launch,
    request: TraceRequest | None = None,
    *,
    batch_argument: str | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    **shown: Any,
) -> TraceAnswer:
    """Predict the memory of an unmodified training script.

    The script really runs, on a simulated GPU, up to its second optimizer step; several times if it
    branches on values of the GPU, see :mod:`gpumemnet.tracing.script.branches`.

    Args:
        launch: the line that starts the script, as whose first rank it is traced.
        request: the GPU, and what else to compute: the memory over one training step, and other
            batch sizes, for which the script is run again.  The script itself says how it trains,
            but for the scaled-dot-product kernel.
        batch_argument: the script's argument that sets its batch size; found by its name and value
            by default.
        deadline_seconds, **shown: as in :func:`trace_file`.

    Returns:
        the answer; all amounts are in bytes, for one GPU.

    Raises:
        ExtractError: names what cannot be traced, and the line of the script.
        InvalidJobError, InvalidRequestError: an option has no such value.
        MissingExtraError: torch is not installed.
    """
    ranks, variables = launch.ranks, launch.variables
    document = {
        **script_document(launch),
        "ranks": None if ranks is None else check_count(ranks, "ranks", 1, MAX_RANKS),
        "batch_argument": batch_argument,
        **asdict(request or checked_request(DEFAULT_OPTIONS)),
    }

    end = monotonic() + SECONDS

    asked = partial(
        asking,
        _trace_in_child,
        launch.script,
        purpose=PURPOSE,
        variables={
            NO_COMPILING: os.environ.get(NO_COMPILING, "1"),
            VISIBLE_ON_LINE: variables.get(VISIBLE, ""),
            **variables,
        },
        deadline_seconds=deadline_seconds,
        **shown,
    )
    with (
        TemporaryDirectory() as stages,
        TemporaryDirectory(prefix="gpumemnet-programs-") as programs,
    ):
        is_late = False

        def answered(
            child: Callable[[Document], Any], assumptions: Assumptions, rank: int = 0
        ) -> TraceAnswer:
            nonlocal is_late
            # With half of the elements, too, the run should come to where it took the most.
            is_half = assumptions.selected_share < 1
            seconds = SECONDS if is_half and is_late else end - monotonic()
            answer = child(
                {
                    "rank": rank,
                    "stages": stages,
                    "programs": programs,
                    **document,
                    "more_seconds": max(_LEAST_SECONDS, seconds / 2),
                    "assumptions": asdict(assumptions),
                }
            )
            found = answer_from_dict(answer)
            is_late |= found.peak.step > _LATE
            return found

        with asked() as child:
            first = largest_answer(partial(answered, child), end)
        others = StageFolder(Path(stages)).others()
        answers, notes = {0: first}, []
        for rank in others:
            try:
                with asked() as child:
                    answers[rank] = answered(child, USUAL, rank)
            except ExtractError as error:
                notes.append(f"rank {rank} differs, and was not traced: {error}")
    if not others:
        return first
    peaks = peaks_by_rank(answers)
    largest = answers[peaks[0].rank]
    notes.append(
        f"ranks differ, as stages of a pipeline do: this is rank {peaks[0].rank}, the largest"
    )
    return replace(largest, by_rank=peaks, notes=(*notes, *largest.notes))


def script_document(launch: Launch) -> Document:
    """Return a script for :func:`script_call`."""
    script = launch.script
    return {
        "script": script if launch.is_module else str(existing_file(script)),
        "is_module": launch.is_module,
        "arguments": list(launch.arguments),
    }


def _trace_in_child(document: Document) -> Document:
    request = request_from_dict(document)
    with inheriting(document, request.gpu, _trace_program) as programs:
        found: list[TraceAnswer] = []
        try:
            found.append(trace_in_process(document, programs))
        except ExtractError as error:
            if not programs.answers():
                if programs.error():
                    raise ExtractError(
                        f"{error}; a process that it started: {programs.error()}"
                    ) from None
                raise
            if request.extras.batches or request.extras.max_batch:
                raise ExtractError(
                    "the script trains in a process that it starts: for other batch sizes, trace the line that starts that one"
                ) from None
        started = list(map(answer_from_dict, programs.answers()))
    answer, *others = sorted((*found, *started), key=lambda each: -each.expected_bytes)
    if started:
        amounts = f" ({', '.join(f'{each.expected_bytes / MIB:,.0f} MiB' for each in others)})"
        is_own = any(each is answer for each in found)
        what = (
            "starts processes that use the GPU" if is_own else "trains in a process that it starts"
        )
        note = (
            f"the script {what}; this is the memory of the largest one that trained, "
            f"and each other process on the GPU{amounts if others else ''} takes its own"
        )
        answer = replace(answer, notes=(note, *answer.notes))
    return answer_to_dict(answer)


def _trace_program(document: Document, programs: Programs) -> None:
    """Trace a program that a script has started, and report its answer."""
    answer = trace_in_process(
        document, programs, seen=lambda answer: programs.seen(answer_to_dict(answer))
    )
    programs.report(answer_to_dict(answer))


def trace_in_process(
    document: Document,
    programs: Programs,
    seen: Callable[[TraceAnswer], None] | None = None,
) -> TraceAnswer:
    """Trace a script in this process, see :func:`trace_script`.

    Args:
        document: the script and how it is traced.
        programs: the programs that it may start.
        seen: as in :class:`~gpumemnet.tracing.script.run.ScriptCall`.

    Raises:
        ExtractError: as :func:`trace_script` does.
    """
    request = request_from_dict(document)
    call, notes = script_call(document, request)
    from gpumemnet.tracing.script import batch_sizes, run, script_run

    call = replace(
        _continued(call, document),
        ranks=document["ranks"],
        rank=document["rank"],
        stages=StageFolder(Path(document["stages"])),
        report=lambda answer: programs.report(answer_to_dict(answer)),
        failed=programs.failed,
        seen=seen,
    )
    extras = request.extras

    def continued(later: Document) -> ScriptCall:
        programs.begin(later, request.gpu)
        return _continued(call, later)

    if extras.batches or extras.max_batch:
        answer = batch_sizes.trace_batches(call, extras, document["batch_argument"])
    else:
        call = replace(call, continued=continued)
        answer = script_run.result_of_script(run.run_script(call), extras.curve)
    return replace(answer, notes=(*answer.notes, *notes))


def _continued(call: ScriptCall, document: Document) -> ScriptCall:
    """Return a call with what differs between the requests for one script."""
    assumptions = from_json(Assumptions, document["assumptions"])
    return replace(call, assumptions=assumptions, more_seconds=document["more_seconds"])


def script_call(document: Document, request: TraceRequest) -> tuple[ScriptCall, tuple[str, ...]]:
    """Return a script that runs alone on a GPU, with notes on the GPU."""
    _LOG.info("importing torch")
    from gpumemnet.tracing.operators.rules import Platform, with_cudnn
    from gpumemnet.tracing.script import run

    _LOG.info("running up to the second step")
    platform = Platform(device=request.gpu, attention_kernel=request.options.attention_kernel)
    platform, notes = with_cudnn(platform, request.cudnn)
    call = run.ScriptCall(
        script=Path(document["script"]),
        arguments=tuple(document["arguments"]),
        platform=platform,
        settings=request.allocator,
        is_module=document["is_module"],
    )
    return call, notes
