"""What a run of a script has shown: its memory, with notes on what may be otherwise in training, and
the answer for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Final

import torch

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.atomic_files import Document
from gpumemnet.launchers.launch_line import local_ranks
from gpumemnet.tracing.model_tracer import result_of_run
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.result import HostMemory, TraceAnswer
from gpumemnet.tracing.script.branches import LEFT, WENT_ON
from gpumemnet.tracing.script.observer import ScriptObserver
from gpumemnet.tracing.script.read_values import ReadValues
from gpumemnet.tracing.script.whole_run import LEAST_GROWTH, WholeRun, grown_bytes, kept_tensors
from gpumemnet.tracing.timeline import Timeline, phases_of, repeated, up_to_peak
from gpumemnet.units import MIB

_MOST_ERRORS: Final = 5
"""Errors after which the run went on, of a line each, that are named."""


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """What a run of a script has shown.

    Attributes:
        file: the script's file.
        timeline: the record of its first steps.
        whole: its first steps and what follows; ``None`` if it ended within them.
        platform: the GPU that the script saw, with its choice whether cuDNN searches for algorithms.
        settings: settings of the caching allocator, of which the script may have chosen some.
        model: names of script and models.
        batch_size: samples that the model got.
        batch_sizes: as in :class:`~gpumemnet.tracing.script.whole_run.Loaders`.
        turned: conditions that were taken the other way before their time → after how many events.
        later_bytes: what passes after the traced steps can take beyond them.
        notes, branches, selections, is_lower_bound, error: values of the same fields of the answer.
    """

    file: Path
    timeline: Timeline
    whole: WholeRun | None
    platform: Platform
    settings: AllocatorSettings
    model: str
    batch_size: int
    batch_sizes: dict[int, bool]
    turned: dict[str, int]
    later_bytes: int
    notes: tuple[str, ...]
    branches: tuple[str, ...]
    selections: tuple[str, ...]
    is_lower_bound: bool
    error: str
    host: HostMemory


def result_of_script(run: ScriptRun, with_curve: bool = False) -> TraceAnswer:
    """Return the answer for a run; ``with_curve`` includes the memory over one step."""
    arguments: Document = {
        "platform": run.platform,
        "settings": run.settings,
        "model": run.model,
        "batch_size": run.batch_size,
        "loss": "the script's own",
        "with_curve": with_curve,
    }
    answer = result_of_run(repeated(run.timeline), notes=run.notes, **arguments)
    phases = answer.phases
    whole, filling = run.whole, 0
    if whole is not None:
        first_steps = len(run.timeline.step_starts) - 1
        phases = phases_of(whole.timeline, first_steps, whole.step_names)
        later = [each for each in phases if each.step > first_steps]
        largest = max(later, key=lambda each: each.requested_bytes, default=phases[0])
        more = largest.requested_bytes - answer.requested_bytes
        filling = whole.filling_bytes
        storages = whole.timeline.storages
        state_bytes = sum(storages[each].size_bytes for each in {*chain(*whole.state)})
        has_more_state = more > 0 and state_bytes > answer.parts["optimizer_state"]
        is_more = has_more_state or more >= min(MIB, answer.requested_bytes // 100)
        longer = result_of_run(whole.timeline, notes=run.notes, **arguments)
        # Evaluations may ask for blocks of other sizes than training leaves in the cache.
        cached = longer.reserved_bytes - answer.reserved_bytes
        if is_more or cached >= max(MIB, answer.reserved_bytes // 100):
            note = (
                whole.peak_sentence(largest, more, run.turned, run.notes)
                if is_more
                else "what follows the first steps, such as an evaluation, asks for blocks of other sizes than those in the "
                f"allocator's cache, which takes {cached / MIB:,.1f} MiB more."
            )
            answer = replace(longer, notes=(*run.notes, note))
    late, held_bytes = 0, answer.parts["optimizer_state"]
    if whole is not None and answer.peak.phase != "build":
        is_later = answer.peak.step > len(run.timeline.step_starts) - 1
        end = len(whole.timeline.events if is_later else run.timeline.events)
        late = whole.late_bytes(min(answer.peak.event, end - 1), held_bytes)
    return replace(
        answer,
        expected_bytes=answer.expected_bytes + late + filling,
        requested_bytes=answer.requested_bytes + late + filling,
        parts={
            **answer.parts,
            "optimizer_state": held_bytes + late,
            "buffer": answer.parts["buffer"] + filling,
        },
        safe_bytes=answer.safe_bytes + late + filling + run.later_bytes,
        branches=run.branches,
        selections=run.selections,
        phases=phases,
        is_lower_bound=run.is_lower_bound,
        error=run.error,
        host=run.host,
    )


def shown_run(
    script: Path,
    file: Path,
    platform: Platform,
    observer: ScriptObserver,
    values: ReadValues,
    settings: AllocatorSettings,
    torch_notes: tuple[str, ...],
) -> ScriptRun:
    """Return what a run has shown that took enough steps.

    Args:
        script: as it was given.
        file: its file.
        platform: the GPU that it has seen.
        observer: has observed it.
        values: what it has read from the GPU.
        settings: settings of the caching allocator.
        torch_notes: notes on the installed PyTorch.
    """
    for sentence in observer.notes.values():
        values.note_once(sentence)
    whole = observer.whole_run()
    timeline = observer.first or observer.recorder.timeline()
    if observer.is_lower_bound and not observer.has_stepped:
        timeline = up_to_peak(timeline)
    growth = grown_bytes(timeline)
    largest = 0 if whole is None else max(whole.kept.values(), default=0)
    if whole is not None and (gathered := whole.filling_bytes + largest):
        told = {**whole.queues, **{f"what rounds of {each} leave": 0 for each in whole.kept}}
        values.note_once(
            f"the script gathers on the GPU for longer than was traced, and at least {gathered / MIB:,.0f} MiB more are counted, "
            f"as {'; '.join(told or whole.full)} tells"
        )
    elif (
        growth >= LEAST_GROWTH
        and whole is not None
        and (
            (len(whole.rises) < 2 and kept_tensors(timeline.events[timeline.step_starts[-2] :]) > 0)
            or sum(whole.rises) > 1
        )
    ):
        values.note_once(
            f"the memory on the GPU grows by {growth / MIB:,.1f} MiB with every step: the script keeps tensors of earlier steps"
        )
    elif whole is not None and sum(whole.rises) > 1:
        values.note_once(
            "the last steps that were traced each end with more on the GPU than those before: later ones may take more"
        )
    for sentence in () if whole is None else whole.sentences:
        values.note_once(sentence)
    lines = [*observer.counters.waiting]
    if whole is not None and lines:
        values.note_once(
            f"{', '.join(lines[:5])}: runs at a later step than the {whole.steps:,} that were traced, "
            "and what it takes then is not in the answer"
        )
    if observer.loops.left:
        values.note_once(
            f"{LEFT}: {', '.join(observer.loops.left)}; "
            "what they gather or generate there is less than in the run"
        )
    if observer.loops.sampled:
        values.note_once(
            f"{', '.join(sorted(observer.loops.sampled))}: each round makes an optimizer, and the last ones that were traced "
            "were alike; a larger network of a later round takes more"
        )
    if observer.loops.hurried:
        values.note_once(
            f"{', '.join(observer.loops.hurried)}: decided as later in the run, because the script gathers for long before it trains"
        )
    of_lines = {each.partition(": ")[0]: shorten(each, 160) for each in observer.loops.errors}
    if of_lines:
        more = f"; and {len(of_lines) - _MOST_ERRORS} more" * (len(of_lines) > _MOST_ERRORS)
        values.note_once(
            f"{WENT_ON}, perhaps only of the trace, and what these statements do is not in the answer: "
            f"{'; '.join([*of_lines.values()][:_MOST_ERRORS])}{more}"
        )
    if observer.batch_size is None:
        values.note_once(
            "the batch size is not known, because no module with parameters ran in training; 1 is shown"
        )
    errors = (each for each, is_cut in observer.loops.errors.items() if not is_cut)
    names = ", ".join(dict.fromkeys(observer.modules.model_names))
    tensor_bytes, pinned_bytes = observer.recorder.host.peaks()
    return ScriptRun(
        file=file,
        timeline=timeline,
        whole=whole,
        platform=replace(platform, cudnn_benchmark=torch.backends.cudnn.benchmark),
        settings=settings,
        model=f"{script.name} ({names})" if names else script.name,
        batch_size=observer.batch_size or 1,
        batch_sizes=observer.loaders.batch_sizes,
        turned=observer.counters.turned,
        later_bytes=0 if whole is None else whole.left_bytes,
        notes=(*torch_notes, *values.notes),
        branches=values.branches,
        selections=tuple(values.selections),
        is_lower_bound=observer.is_lower_bound,
        error=next(errors, "" if observer.progress.has_trained else observer.error),
        host=HostMemory(
            tensor_bytes=tensor_bytes,
            pinned_bytes=pinned_bytes,
            waiting_bytes=observer.loaders.waiting_bytes,
            node_ranks=local_ranks(timeline.ranks),
        ),
    )
