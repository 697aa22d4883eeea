"""Splits a traced training step into units, and finds out what each of them saves, needs and
computes.

Repeated blocks are units, as trainers checkpoint them.  Other modules are split until none holds
more than :data:`LARGEST_SHARE` of the saved bytes; what is left below :data:`SMALLEST_SHARE` is no
unit, because a decision about it changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from gpumemnet.allocator import EMPTY_CACHE
from gpumemnet.errors import ExtractError, PlanError
from gpumemnet.extract.checkpointing import blocks
from gpumemnet.extract.module_calls import as_model_inputs
from gpumemnet.planner.costs import Pass, StepCosts, UnitPass
from gpumemnet.planner.plans import Decision
from gpumemnet.planner.recomputing import check_plan
from gpumemnet.planner.step_recorder import ModuleCall, OperatorCost, SavedTensor, StepRecorder
from gpumemnet.tracing.operators.rules import Platform, with_cudnn
from gpumemnet.tracing.timeline import Timeline
from gpumemnet.tracing.training_loop import record

if TYPE_CHECKING:
    from torch import nn

    from gpumemnet.tracing.api import TraceRequest

LARGEST_SHARE: Final = 1 / 8
"""A module that saves more than this share of the bytes is split, unless it is a repeated block."""
SMALLEST_SHARE: Final = 0.01
"""A module that saves less than this share of the bytes is no unit."""
_LASTING: Final = frozenset({"parameter", "buffer", "gradient", "optimizer_state"})


def split_step(model: nn.Module, inputs: object, request: TraceRequest) -> StepCosts:
    """Trace two training steps of ``model`` on meta tensors, and split them into units.

    The model is left as it was.

    Args:
        model, inputs: as those of :func:`gpumemnet.trace`.
        request: how the model is trained, and the GPU, from
            :func:`~gpumemnet.tracing.api.checked_request`.

    Raises:
        ExtractError: the model cannot be traced, or nothing in it is large enough to plan for.
        PlanError: the executor would refuse every plan for this model.
    """
    options = request.options
    model_inputs = as_model_inputs(inputs, None)
    platform, cudnn_notes = with_cudnn(Platform.of(request.gpu, options), request.cudnn)
    recorders: list[StepRecorder] = []

    def new_recorder(*args: Any, **kwargs: Any) -> StepRecorder:
        recorders.append(StepRecorder(*args, **kwargs))
        return recorders[-1]

    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: recorders[-1].pack(tensor) if recorders else tensor.detach(),
        lambda held: recorders[-1].unpack(held) if recorders else held,
    ):
        recording = record(model, model_inputs, options, platform, new_recorder=new_recorder)
    if not options.tf32:
        for operator in recorders[-1].operators:
            operator.element_type = operator.element_type.replace("tf32", "fp32")
    step = _Reading(recorders[-1], recording.timeline, model)
    unit_names, passes = step.units_and_passes()
    refused = _refused(model, unit_names)
    first_of_last_step = recording.timeline.step_starts[-2]
    return StepCosts(
        units=unit_names,
        passes=passes,
        timeline=recording.timeline,
        unreferenced=recorders[-1].unreferenced,
        released=step.released,
        allocated=step.allocated,
        freed=step.freed,
        operators=recorders[-1].operators,
        optimizer=tuple(step.operators[len(recording.timeline.phases) - 1]),
        evictable=step.evictable(passes[-1], unit_names, refused),
        device=request.gpu,
        settings=request.allocator,
        microbatches=sum(each.start >= first_of_last_step for each in passes),
        notes=(
            *cudnn_notes,
            *([model_inputs.note] if model_inputs.note else []),
            *recording.notes,
            *refused.values(),
        ),
    )


def _refused(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the units that the executor neither recomputes nor swaps, with its reasons."""
    refused: dict[str, str] = {}
    for name in names:
        try:
            check_plan(model, {name: Decision.RECOMPUTE_AND_SWAP_INPUT})
        except PlanError as error:
            if len(names) == len(refused) + 1:
                raise
            refused[name] = f"'{name}' keeps everything: {error}"
    return refused


class _Reading:
    """Reads units and passes from what a recorder collected."""

    def __init__(self, recorder: StepRecorder, timeline: Timeline, model: nn.Module) -> None:
        self._recorder = recorder
        self._timeline = timeline
        self._sizes = timeline.sizes
        self.allocated = {event: index for index, event in enumerate(timeline.events) if event >= 0}
        self.freed = {
            ~event: index
            for index, event in enumerate(timeline.events)
            if event < 0 and event != EMPTY_CACHE
        }
        self.released: dict[int, int] = {}
        names = {module: name for name, module in model.named_modules()}
        self._blocks = {names[block] for block in _all_blocks(model) if block in names}
        self._casts = {
            result
            for source, result in recorder.casts
            if timeline.storages[source].memory_class == "parameter"
        }
        self._forward_phases = [
            i for i, phase in enumerate(timeline.phases) if phase.name == "forward" and phase.step
        ]
        self._saved: dict[int, list[SavedTensor]] = defaultdict(list)
        for saved in recorder.saved:
            if timeline.storages[saved.storage].memory_class not in _LASTING and self._is_of_a_step(
                saved.storage
            ):
                self._saved[saved.phase].append(saved)
        self._calls: dict[int, list[int]] = defaultdict(list)
        for index, call in enumerate(recorder.module_calls):
            self._calls[call.phase].append(index)
        self.operators: dict[int, list[int]] = defaultdict(list)
        for index, operator in enumerate(recorder.operators):
            self.operators[operator.phase].append(index)

    def _is_of_a_step(self, storage: int) -> bool:
        return self.allocated[storage] >= self._timeline.step_starts[0]

    def units_and_passes(self) -> tuple[tuple[str, ...], tuple[Pass, ...]]:
        """Return the names of the units, and every pass."""
        names = self._choose(self._forward_phases[-1])
        names = [name for name in names if self._has_backward_pass(name)]
        if not names:
            raise ExtractError(
                "plan: no module runs once in a forward pass and saves at least 1 % of the bytes: nothing to plan"
            )
        return tuple(names), tuple(self._pass(phase, names) for phase in self._forward_phases)

    def evictable(
        self, last: Pass, names: Sequence[str], keep: Collection[str]
    ) -> tuple[bool, ...]:
        """Return which units may do anything but keep."""
        unit = last.units[-1]
        total = self._bytes_of(saved.storage for saved in self._saved[self._forward_phases[-1]])
        window = self._timeline.events[unit.end : unit.backward_start]
        between = self._bytes_of(event for event in window if event >= 0)
        is_worthwhile = [name not in keep for name in names]
        is_worthwhile[-1] &= names[-1] in self._blocks and between >= SMALLEST_SHARE * total
        return tuple(is_worthwhile)

    # Choice of the units.

    def _choose(self, phase: int) -> list[str]:
        calls = self._recorder.module_calls
        children: dict[int, list[int]] = defaultdict(list)
        for index in self._calls[phase]:
            children[calls[index].parent].append(index)
        times = Counter(calls[index].module for index in self._calls[phase])
        held: dict[int, set[int]] = defaultdict(set)
        for saved in self._saved[phase]:
            call = saved.call
            while call >= 0:
                held[call].add(saved.storage)
                call = calls[call].parent
        total = self._bytes_of({saved.storage for saved in self._saved[phase]})
        share = {index: self._bytes_of(held[index]) / max(total, 1) for index in self._calls[phase]}

        def has_blocks(index: int) -> bool:
            return any(
                calls[child].module in self._blocks or has_blocks(child)
                for child in children[index]
            )

        def split(index: int) -> list[int]:
            inside = children[index]
            if calls[index].module in self._blocks and times[calls[index].module] == 1:
                found = (
                    [unit for child in inside for unit in split(child)] if has_blocks(index) else []
                )
                is_stack = sum(share[unit] for unit in found) > (1 - LARGEST_SHARE) * share[index]
                return found if is_stack else [index]
            is_root = calls[index].parent < 0
            if inside and (is_root or has_blocks(index) or share[index] > LARGEST_SHARE):
                found = [unit for child in inside for unit in split(child)]
                if found or is_root:
                    return found or [child for child in inside if _is_unit(child)]
            return [index] if inside and _is_unit(index) else []

        def _is_unit(index: int) -> bool:
            is_called_once = times[calls[index].module] == 1 and calls[index].module != ""
            return is_called_once and calls[index].end >= 0 and share[index] >= SMALLEST_SHARE

        found = [unit for root in children[-1] for unit in split(root)]
        if not found:  # a model of layers without blocks
            found = [
                index for index in self._calls[phase] if not children[index] and _is_unit(index)
            ]
        return [
            calls[index].module for index in sorted(found, key=lambda index: calls[index].start)
        ]

    def _has_backward_pass(self, name: str) -> bool:
        for phase in self._forward_phases:
            owners = self._owners(phase, [name])
            if not any(saved.used >= 0 and saved.call in owners for saved in self._saved[phase]):
                return False
        return True

    def _bytes_of(self, storages: Any) -> int:
        return sum(self._sizes[storage] for storage in storages)

    # Passes.

    def _owners(self, phase: int, names: Sequence[str]) -> dict[int, int]:
        """Return the unit of each module call that belongs to one."""
        numbers = {name: number for number, name in enumerate(names)}
        owners: dict[int, int] = {}
        for index in self._calls[phase]:
            call = self._recorder.module_calls[index]
            if call.module in numbers:
                owners[index] = numbers[call.module]
            elif call.parent in owners:
                owners[index] = owners[call.parent]
        return owners

    def _released_at(self, saved: SavedTensor) -> int:
        end = self.freed.get(saved.storage, len(self._timeline.events))
        if saved.node is None:
            return end
        return min(self._recorder.node_ends[saved.phase + 1, saved.node], end)

    def _pass(self, phase: int, names: Sequence[str]) -> Pass:
        owners = self._owners(phase, names)
        operators = self._recorder.operators
        saved_by: list[list[SavedTensor]] = [[] for _ in names]
        for saved in self._saved[phase]:
            if saved.call in owners:
                saved_by[owners[saved.call]].append(saved)
            else:
                until = self._released_at(saved)
                self.released[saved.storage] = max(self.released.get(saved.storage, 0), until)
        forward, backward = self.operators[phase], self.operators[phase + 1]
        forward_by, outside_forward = self._by_unit(forward, owners, len(names))
        backward_by, outside_backward = self._by_unit(backward, owners, len(names))
        calls = {
            self._recorder.module_calls[index].module: self._recorder.module_calls[index]
            for index in self._calls[phase]
        }
        units = tuple(
            self._unit_pass(calls[name], saved_by[number], forward_by[number], backward_by[number])
            for number, name in enumerate(names)
        )
        ends = [unit.end for unit in units]
        before, between = _split_at(outside_forward, operators, ends)
        order = sorted(range(len(names)), key=lambda number: units[number].backward_start)
        turn, after = _split_at(
            outside_backward, operators, [units[number].backward_start for number in order]
        )
        phases = self._timeline.phases
        return Pass(
            units,
            phases[phase].start,
            phases[phase + 1].start,
            phases[phase + 2].start if phase + 2 < len(phases) else len(self._timeline.events),
            before,
            between,
            turn,
            tuple(after[order.index(number)] for number in range(len(names))),
        )

    def _by_unit(
        self, indices: Sequence[int], owners: dict[int, int], count: int
    ) -> tuple[list[list[int]], list[int]]:
        by_unit: list[list[int]] = [[] for _ in range(count)]
        outside: list[int] = []
        for index in indices:
            unit = owners.get(self._recorder.operators[index].call)
            (outside if unit is None else by_unit[unit]).append(index)
        return by_unit, outside

    def _unit_pass(
        self,
        call: ModuleCall,
        all_saved: Sequence[SavedTensor],
        forward: Sequence[int],
        backward: Sequence[int],
    ) -> UnitPass:
        saved: dict[int, int] = {}
        used_until: dict[int, int] = {}
        for each in all_saved:
            saved[each.storage] = max(saved.get(each.storage, 0), self._released_at(each))
            if each.node is not None:
                until = self._recorder.node_uses[each.phase + 1, each.node]
                used_until[each.storage] = max(used_until.get(each.storage, 0), until)
        used = [each for each in all_saved if each.used >= 0]
        end = call.end if call.end >= 0 else call.start
        backward_start = min(each.used for each in used)
        operators = self._recorder.operators
        stop = max(each.at for each in all_saved)
        rerun = [index for index in forward if operators[index].start < stop]
        products = {
            event
            for each in (operators[index] for index in forward)
            if each.is_kept
            for event in self._timeline.events[each.start : each.end]
            if event >= 0
        }
        inputs = (
            storage
            for storage in call.inputs
            if self._timeline.storages[storage].memory_class not in _LASTING
        )
        return UnitPass(
            start=call.start,
            end=end,
            stop=stop,
            backward_start=backward_start,
            backward_end=max(self._released_at(each) for each in used),
            saved=saved,
            used_until=used_until,
            inputs=tuple(storage for storage in inputs if self._is_of_a_step(storage)),
            weights=frozenset(saved) & self._casts,
            products=frozenset(products),
            forward=tuple(forward),
            rerun=tuple(rerun),
            backward=tuple(backward),
        )


def _all_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model``, and those of stacks inside of them."""
    return [each for block in blocks(model) for each in (block, *_all_blocks(block))]


def _split_at(
    indices: Sequence[int], operators: Sequence[OperatorCost], positions: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the operators before the first of the ascending ``positions``, and those from each
    position to the next one."""
    groups: list[list[int]] = [[] for _ in range(len(positions) + 1)]
    for index in indices:
        groups[int(np.searchsorted(positions, operators[index].start, side="right"))].append(index)
    return tuple(groups[0]), tuple(map(tuple, groups[1:]))
