"""The exact depth: the model is built on meta by the library that it comes from, the method applied
by ``peft`` and ``bitsandbytes``, and training steps as Hugging Face's Trainer runs them are traced.

Everything runs in a child process.  Weights are never loaded, code from the hub is never run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.atomic_files import Document, from_json
from gpumemnet.errors import ExtractError, check_installed
from gpumemnet.gpu import DeviceProfile
from gpumemnet.job.training_job import OPTIMIZERS
from gpumemnet.named.catalogue import NamedModel
from gpumemnet.named.methods import EIGHT_BIT, Method
from gpumemnet.named.step_walk import PARTS, ProcessPeak
from gpumemnet.sandbox.process import Progress, ask
from gpumemnet.tracing.api import (
    DEADLINE_SECONDS,
    TraceOptions,
    TraceRequest,
    checked_request,
    checked_torch,
    request_from_dict,
)

if TYPE_CHECKING:
    from gpumemnet.named.real_model import RealModel

PURPOSE: Final = "the exact depth of fit"
_LOG: Final = logging.getLogger("gpumemnet.named.exact")
_PARTS: Final = {
    "parameter": "base_weights_bytes",
    "buffer": "base_weights_bytes",
    "gradient": "gradients_bytes",
    "optimizer_state": "optimizer_bytes",
    "workspace": "workspace_bytes",
    "communication": "workspace_bytes",
}
"""Memory class of a trace → part of an answer."""


def exact_peak(
    model: NamedModel, method: Method, gpu: DeviceProfile, progress: Progress | None = None
) -> ProcessPeak:
    """Trace the training of a named model.

    Args:
        model: the model.
        method: how it is trained.
        gpu: the GPU.
        progress: called with a few words at each stage.

    Raises:
        ExtractError: the libraries cannot build the model, or it cannot be traced.
        MissingExtraError: names the package to install.
    """
    found = ask(
        _in_child,
        model.name,
        stated_job(model, method, checked_request(trace_options(method), gpu)),
        purpose=PURPOSE,
        deadline_seconds=DEADLINE_SECONDS,
        progress=progress,
    )
    peak: ProcessPeak = from_json(ProcessPeak, found)
    return peak


def stated_job(model: NamedModel, method: Method, request: TraceRequest) -> Document:
    """A job for a child process: what builds the model, and the request of its trace.

    Raises:
        ExtractError: the job cannot be traced.
        MissingExtraError: names the package to install.
    """
    reason = _obstacle(model, method)
    if reason:
        raise ExtractError(reason)
    for package in _packages(model, method):
        check_installed(package, "fit", PURPOSE)
    return {
        "model": asdict(replace(model, extracted=None)),
        "method": asdict(method),
        "trace": asdict(request),
    }


def trace_options(method: Method) -> TraceOptions:
    """How a trace trains with a method; the optimizer may be the library's own."""
    autocast = "amp_fp16" if method.precision == "amp_fp16" else "amp_bf16"
    return TraceOptions(
        optimizer=method.optimizer if method.optimizer in OPTIMIZERS else "sgd",
        optimizer_implementation=method.step_implementation,
        precision=autocast if method.is_autocast else "fp32",
        gradient_accumulation=min(method.gradient_accumulation, 2),
        attention_kernel=method.attention,
        keeps_names=False,  # the steps of Trainer and of litgpt are functions
    )


def library_of(model: NamedModel, method: Method) -> str:
    """The library that builds a model."""
    kind = model.config.get("model_type")
    if method.library == "litgpt":
        return method.library
    if kind == "layers":
        return model.name.partition("/")[0]
    return "diffusers" if kind == "diffusers" else "transformers"


def _obstacle(model: NamedModel, method: Method) -> str:
    """Why this job cannot be traced."""
    if model.config.get("model_type") == "layers" and method.has_adapters:
        return "adapters on networks of images are not traced"
    if method.quantisation not in ("", "nf4"):
        return f"layers of {method.quantisation} are not traced"
    if method.library == "litgpt" and find_spec("litgpt") is None:
        return "litgpt is not installed: docs/accuracy/readings.md says how"
    if method.gpus > 1 and method.parallel == "zero3" and method.is_quantised:
        return "DeepSpeed's partitions of a quantised base are not traced"
    return ""


def _packages(model: NamedModel, method: Method) -> Iterator[str]:
    yield "torch"
    library = library_of(model, method)
    yield library
    if method.has_adapters and library != "litgpt":
        yield "peft"
    if needs_bitsandbytes(method):
        yield "bitsandbytes"
    if method.gpus > 1:
        yield "deepspeed" if method.parallel.startswith("zero") else "accelerate"


def needs_bitsandbytes(method: Method) -> bool:
    """Whether ``bitsandbytes`` has a part in the training."""
    return method.is_quantised or method.optimizer in EIGHT_BIT[:1]


def _in_child(document: Document) -> Document:
    model, method = NamedModel(**document["model"]), Method(**document["method"])
    request = request_from_dict(document["trace"])
    _LOG.info("importing torch and the model's library")
    notes = checked_torch()
    from gpumemnet.extract.module_calls import as_model_inputs
    from gpumemnet.launchers.rank_program import train_on_rank, unwrapped
    from gpumemnet.named.real_model import built
    from gpumemnet.named.real_quantised import patches
    from gpumemnet.tracing.losses_and_optimizers import optimizer_factory
    from gpumemnet.tracing.model_tracer import result_of_run
    from gpumemnet.tracing.operators.rules import Platform
    from gpumemnet.tracing.script.run import ScriptCall, run_script
    from gpumemnet.tracing.timeline import live_at, repeated
    from gpumemnet.tracing.training_loop import record

    options = request.options
    platform = Platform.of(request.gpu, options)

    made: list[RealModel] = []

    def train() -> Any:
        real = built(model, method)
        made.append(real)
        own = replace(options, own_optimizer=real.optimizer)
        _LOG.info("tracing training steps")
        with patches(real.module, method):
            if method.gpus == 1:
                inputs = as_model_inputs(real.inputs, method.batch_size)
                return record(real.module, inputs, own, platform)
            factory = optimizer_factory(own, {})
            train_on_rank(real.module, real.inputs, factory, method, own.gradient_accumulation)
            return None

    if method.gpus == 1:
        timeline = train().timeline
    else:  # the first of several, as accelerate or DeepSpeed runs it
        call = ScriptCall(
            script=Path(__file__),
            arguments=(),
            platform=platform,
            settings=request.allocator,
            ranks=method.gpus,
            more_seconds=0.0,
            program=train,
        )
        timeline = run_script(call).timeline
    [real] = made
    run = repeated(timeline)
    answer = result_of_run(
        run,
        platform,
        request.allocator,
        model=model.name,
        batch_size=method.batch_size,
        loss="",
        notes=(),
        with_curve=False,
    )
    peak, parts = answer.peak, dict.fromkeys((*PARTS, "context_bytes"), 0)
    for index in live_at(run, peak.event):
        storage = run.storages[index]
        name = _PARTS.get(storage.memory_class)
        module = unwrapped(storage.module, method.gpus)
        if name == "base_weights_bytes" and "lora_" in module:
            name = "adapters_bytes"
        elif name is None:
            is_head = module in real.heads and peak.phase != "optimizer"
            name = "logits_bytes" if is_head else "activations_bytes"
        parts[name] += storage.size_bytes
    parts["workspace_bytes"] += answer.parts["communicator"]
    parts["fragmentation_bytes"] = answer.parts["fragmentation"]
    parts["context_bytes"] = answer.parts["context"]
    module = unwrapped(peak.module, method.gpus).removeprefix("model.")
    place = f" of {module}" if module else ""
    return {
        "parameters": real.parameters,
        "trained_parameters": real.trained_parameters,
        "expected_bytes": answer.expected_bytes,
        "safe_bytes": answer.safe_bytes,
        "parts": parts,
        "moment": "optimizer step" if peak.phase == "optimizer" else f"{peak.phase} pass{place}",
        "notes": [*notes, *real.notes],
    }
