"""What else makes a job smaller: other settings of the same training, each with its memory from a
trace.

A plan recomputes or moves activations.  Often a setting does the same for less: an optimizer that
needs no temporaries, autocast, smaller microbatches.  ``alternatives.json`` declares them, each as
one change to the job as it stands.  Its memory is that of a new trace, or, where blocks do what a
plan can do, of the recorded step with that plan; nothing is estimated by a factor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

from torch import nn

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.atomic_files import (
    Document,
    shipped_json,
)
from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.extract.module_calls import ModelInputs
from gpumemnet.gpu import verdict_of
from gpumemnet.named.methods import Method
from gpumemnet.named.real_losses import TrainedModel
from gpumemnet.named.real_quantised import optimizer_of
from gpumemnet.physics.optimizers import OPTIMIZER_RULES
from gpumemnet.planner.chain import Chain
from gpumemnet.planner.costs import Machine, StepCosts
from gpumemnet.planner.planned_step import simulate
from gpumemnet.planner.plans import Alternative, Decision, ranges
from gpumemnet.tracing.api import TraceOptions, TraceRequest
from gpumemnet.tracing.model_tracer import BatchMemory
from gpumemnet.tracing.operators.rules import Platform, with_cudnn
from gpumemnet.tracing.timeline import Memory, Timeline, steady_memory
from gpumemnet.tracing.training_loop import record

_LOG: Final = logging.getLogger(__name__)
_ACCUMULATED: Final = 2
"""Microbatches that are traced where gradients accumulate: from the second on they exist during
forward and backward passes."""


def alternatives(
    model: nn.Module,
    inputs: ModelInputs,
    request: TraceRequest,
    costs: tuple[StepCosts, Machine, Chain] | None,
) -> tuple[Alternative, ...]:
    """Trace every change of settings that this job has not made yet; the model is left as it was.

    Args:
        model: the model, on any device.
        inputs: what it is called with.
        request: how it is trained, and the GPU with the memory that is available, see
            :func:`~gpumemnet.gpu.with_available`.
        costs: the step, split into units; without, nothing is said of its blocks.

    Returns:
        the alternatives of ``alternatives.json`` in their order: settings that change no result,
        then number formats, then more GPUs, then a number format for the weights themselves.
    """
    job = _Job(model, inputs, request, costs)
    found = []
    for change in shipped_json("planner/alternatives.json"):
        try:
            found.append(job.changed(change))
        except (ExtractError, InvalidRequestError, ImportError) as error:
            _LOG.info("%s: cannot be traced: %s", change["name"], error)
    return tuple(each for each in found if each is not None)


@dataclass(frozen=True)
class _Job:
    """The job as it stands, and what its changes take."""

    model: nn.Module
    inputs: ModelInputs
    request: TraceRequest
    costs: tuple[StepCosts, Machine, Chain] | None

    def changed(self, change: Mapping[str, Any]) -> Alternative | None:
        """Return what the job takes with a change; ``None`` if it does not go with this job."""
        now = self.request.options
        where = change.get("where", {})
        if any(getattr(now, name) not in values for name, values in where.items()):
            return None
        options = dict(change.get("options", {}))
        words: Document = {
            "optimizer": OPTIMIZER_RULES[now.optimizer].torch_class,
            "time": change.get("time"),
        }
        if "decision" in change:
            memory = self._decided(Decision(change["decision"]), change.get("step", 1), words)
        elif change["name"] == "microbatches":
            memory = self._accumulated(options)
        else:
            memory = self._with_options(options, change.get("own_optimizer"))
        if memory is None:
            return None
        is_named = isinstance(self.model, TrainedModel)
        how = change["trainer" if is_named and "trainer" in change else "how"]
        change_text, how_text, time = (
            text.format(**words, **options) for text in (change["change"], how, words["time"])
        )
        return Alternative(
            name=change["name"],
            change=change_text,
            expected_bytes=memory.expected_bytes,
            safe_bytes=memory.safe_bytes,
            verdict=verdict_of(memory, self.request.gpu),
            effect=change["effect"],
            time=time,
            how=how_text,
            trace_options=options,
        )

    def _decided(self, decision: Decision, every: int, words: Document) -> Memory | None:
        """Return the memory of a step with one decision for each ``every``-th unit."""
        if self.costs is None:
            return None
        step, machine, chain = self.costs
        units = [unit for unit, may in zip(step.units, step.evictable, strict=True) if may]
        planned = simulate(step, machine, dict.fromkeys(units[::every], decision), chain=chain)
        if planned.host_bytes > machine.host_memory_bytes:
            return None
        kept = chain.seconds_of(chain.keep_all())
        words["time"] = f"{100 * (planned.step_seconds / kept - 1):+.1f} %, modelled"
        is_named = isinstance(self.model, TrainedModel)  # the model is inside of its loss
        words["model"] = "trainer.model" if is_named else "model"
        words["blocks"] = ", ".join(ranges(u.removeprefix("model." * is_named) for u in units))
        return self._memory(planned.timeline)

    def _accumulated(self, options: Document) -> Memory | None:
        """Return the memory of the largest microbatch below the job's batch that fits, of one
        sample if none does, and put both numbers into ``options``."""
        now, whole = self.request.options, self.inputs.batch_size
        if whole < 2:
            return None
        accumulating = replace(
            now, gradient_accumulation=max(_ACCUMULATED, now.gradient_accumulation)
        )
        memory = BatchMemory(
            lambda size: self._timeline(accumulating, size),
            self.request.gpu,
            self.request.allocator,
        )
        size = microbatch_size(whole, memory.largest(whole, most=whole - 1))
        passes = now.gradient_accumulation * ceil(whole / size)
        options |= {"batch_size": size, "gradient_accumulation": passes}
        return memory.exact(size)

    def _with_options(self, options: Document, own_optimizer: str | None) -> Memory | None:
        """Return the memory with other options; ``None`` if they are those of the job."""
        now, allocator = self.request.options, self.request.allocator
        changed = {name: value for name, value in options.items() if name != "allocator_conf"}
        if own_optimizer:
            changed["own_optimizer"] = optimizer_of(Method(optimizer=own_optimizer))
        wanted = replace(now, **changed)
        if wanted != now:
            return self._memory(self._timeline(wanted, self.inputs.batch_size))
        if allocator.expandable_segments or "allocator_conf" not in options:
            return None
        timeline = (
            self.costs[0].timeline if self.costs else self._timeline(now, self.inputs.batch_size)
        )
        return self._memory(timeline, replace(allocator, expandable_segments=True))

    def _memory(self, timeline: Timeline, allocator: AllocatorSettings | None = None) -> Memory:
        return steady_memory(timeline, self.request.gpu, allocator or self.request.allocator)

    def _timeline(self, options: TraceOptions, batch_size: int) -> Timeline:
        _LOG.info("tracing an alternative at batch size %d", batch_size)
        request = self.request
        platform, _ = with_cudnn(Platform.of(request.gpu, request.options), request.cudnn)
        return record(self.model, self.inputs.resized(batch_size), options, platform).timeline


def microbatch_size(batch_size: int, largest: int) -> int:
    """Return the size of microbatches of at most ``largest`` samples, at least 1, that make up
    ``batch_size`` samples.

    They are of one size if that takes at most twice as many of them; otherwise the last one is
    smaller.
    """
    largest = max(1, largest)
    divisor = next(size for size in range(largest, 0, -1) if batch_size % size == 0)
    return divisor if 2 * divisor >= largest else ceil(batch_size / ceil(batch_size / largest))
