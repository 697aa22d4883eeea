"""What else makes a job smaller: other settings of the same training, each with its memory from a
trace.

A plan recomputes or moves activations.  Often a setting does the same for less: an optimizer that
needs no temporaries, autocast, smaller microbatches.  Each alternative here is one change to the
job as it stands, traced anew; nothing is estimated by a factor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any, Final

from torch import nn

from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.extract.checkpointing import blocks
from gpumemnet.extract.module_calls import ModelInputs
from gpumemnet.physics.element_types import AUTOCAST_TYPES
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, torch_call
from gpumemnet.planner.plans import Alternative
from gpumemnet.torch_private.names import is_batch_norm
from gpumemnet.tracing.api import TraceOptions, TraceRequest
from gpumemnet.tracing.model_tracer import BatchMemory, BatchTraces, verdict_of
from gpumemnet.tracing.operators.rules import Platform, with_cudnn
from gpumemnet.tracing.result import BatchPoint
from gpumemnet.tracing.timeline import Timeline, steady_memory
from gpumemnet.tracing.training_loop import record

_LOG: Final = logging.getLogger(__name__)
_ACCUMULATED: Final = 2
"""Microbatches that are traced where gradients accumulate: from the second on they exist during
forward and backward passes."""


def alternatives(
    model: nn.Module, inputs: ModelInputs, request: TraceRequest
) -> tuple[Alternative, ...]:
    """Trace every change of settings that this job has not made yet; the model is left as it was.

    Args:
        model: the model, on any device.
        inputs: what it is called with.
        request: how it is trained, and the GPU with the memory that is available, see
            :func:`~gpumemnet.gpu.with_available`.

    Returns:
        the alternatives, those that change least of the training first: settings that change no
        result, then faster number formats, then slower steps, then a number format for the weights
        themselves.
    """
    return tuple(_Alternatives(model, inputs, request).all())


class _Alternatives:
    """The job as it stands, and what its changes take."""

    def __init__(self, model: nn.Module, inputs: ModelInputs, request: TraceRequest) -> None:
        self._model = model
        self._inputs = inputs
        self._request = request
        self._platform, _ = with_cudnn(Platform.of(request.gpu, request.options), request.cudnn)

    def all(self) -> Iterator[Alternative]:
        """Yield the alternatives in order."""
        for kind in (
            self._expandable_segments,
            self._small_optimizer,
            self._autocast,
            self._microbatches,
            self._checkpointing,
            self._bf16,
        ):
            try:
                found = kind()
            except (ExtractError, InvalidRequestError) as error:
                _LOG.info("%s: cannot be traced: %s", kind.__name__.strip("_"), error)
            else:
                if found is not None:
                    yield found

    def _expandable_segments(self) -> Alternative | None:
        settings = self._request.allocator
        if settings.expandable_segments:
            return None
        request = replace(self._request, allocator=replace(settings, expandable_segments=True))
        return self._traced(
            request,
            name="expandable_segments",
            change="let the allocator's segments grow",
            effect="no effect on results",
            how="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            trace_options={"allocator_conf": "expandable_segments:True"},
        )

    def _small_optimizer(self) -> Alternative | None:
        """Return the implementation of the same optimizer that needs fewer temporaries."""
        options = self._request.options
        if options.own_optimizer is not None or options.optimizer_implementation not in (
            "default",
            "foreach",
        ):
            return None
        rule = OPTIMIZER_RULES[options.optimizer]
        is_foreach = options.optimizer_implementation == "foreach" or rule.is_foreach_by_default
        if not (is_foreach and rule.foreach_copies):
            return None
        implementation = "fused" if rule.has_fused else "for_loop"
        _, arguments = torch_call(options.optimizer, implementation)
        switch = next(
            f"{name}={value}" for name, value in arguments.items() if name in ("fused", "foreach")
        )
        return self._with_options(
            {"optimizer_implementation": implementation},
            name=f"{implementation}_optimizer",
            change=f"the {implementation.replace('_', '-')} implementation of {rule.torch_class}",
            effect=f"results differ by rounding; a {'shorter' if rule.has_fused else 'longer'} optimizer step",
            how=f"torch.optim.{rule.torch_class}(…, {switch})",
        )

    def _autocast(self) -> Alternative | None:
        precision = self._request.options.precision
        if precision in AUTOCAST_TYPES or precision == "bf16":
            return None
        return self._with_options(
            {"precision": "amp_bf16"},
            name="amp_bf16",
            change="bf16 autocast",
            effect="matrix products and convolutions in bf16, weights in fp32; faster on tensor cores",
            how='with torch.autocast("cuda", dtype=torch.bfloat16): forward pass and loss',
        )

    def _microbatches(self) -> Alternative | None:
        if self._inputs.batch_size < 2:
            return None
        point, passes = self._largest_microbatch(self._request)
        has_statistics = any(is_batch_norm(module) for module in self._model.modules())
        statistics = "; batch norm sees one microbatch" if has_statistics else ""
        return Alternative(
            name="microbatches",
            change=f"{passes:,} microbatches of {point.batch_size:,}, gradients accumulated",
            expected_bytes=point.expected_bytes,
            safe_bytes=point.safe_bytes,
            verdict=point.verdict,
            effect=f"results differ by rounding{statistics}; smaller kernels may use the GPU less",
            how=f"batch size {point.batch_size:,}, loss / {passes:,}, optimizer.step() after {passes:,} backward passes",
            trace_options={"batch_size": point.batch_size, "gradient_accumulation": passes},
        )

    def _checkpointing(self) -> Alternative | None:
        if self._request.options.checkpointing != "none" or not blocks(self._model):
            return None
        return self._with_options(
            {"checkpointing": "every_block"},
            name="checkpointing",
            change="checkpoint every block",
            effect="no effect on results; each block's forward pass runs twice",
            how="torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        )

    def _bf16(self) -> Alternative | None:
        if self._request.options.precision == "bf16":
            return None
        return self._with_options(
            {"precision": "bf16"},
            name="bf16",
            change="weights, gradients and state in bf16",
            effect="small updates of weights are rounded away: check that the loss still falls",
            how="model.to(torch.bfloat16)",
        )

    def _largest_microbatch(self, request: TraceRequest) -> tuple[BatchPoint, int]:
        """Return the largest microbatch below the job's batch that fits, and how many accumulate to
        the job's samples per step.

        If none fits, it is that of one sample.
        """
        options, whole = request.options, self._inputs.batch_size
        accumulating = replace(
            options, gradient_accumulation=max(_ACCUMULATED, options.gradient_accumulation)
        )
        traces = BatchTraces(lambda batch_size: self._timeline(accumulating, batch_size), whole)
        memory = BatchMemory(traces, request.gpu, request.allocator)
        point = memory.point(microbatch_size(whole, min(memory.largest(), whole - 1)))
        return point, options.gradient_accumulation * ceil(whole / point.batch_size)

    def _with_options(self, changed: dict[str, Any], **texts: Any) -> Alternative:
        request = replace(self._request, options=replace(self._request.options, **changed))
        return self._traced(request, trace_options=changed, **texts)

    def _traced(self, request: TraceRequest, **texts: Any) -> Alternative:
        timeline = self._timeline(request.options, self._inputs.batch_size)
        memory = steady_memory(timeline, request.gpu, request.allocator)
        return Alternative(
            expected_bytes=memory.expected_bytes,
            safe_bytes=memory.safe_bytes,
            verdict=verdict_of(memory, request.gpu),
            **texts,
        )

    def _timeline(self, options: TraceOptions, batch_size: int) -> Timeline:
        _LOG.info("tracing an alternative at batch size %d", batch_size)
        return record(
            self._model, self._inputs.resized(batch_size), options, self._platform
        ).timeline


def microbatch_size(batch_size: int, largest: int) -> int:
    """Return the size of microbatches of at most ``largest`` samples, at least 1, that make up
    ``batch_size`` samples.

    They are of one size if that takes at most twice as many of them; otherwise the last one is
    smaller.
    """
    largest = max(1, largest)
    divisor = next(size for size in range(largest, 0, -1) if batch_size % size == 0)
    return divisor if 2 * divisor >= largest else ceil(batch_size / ceil(batch_size / largest))
