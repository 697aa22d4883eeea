"""``gpumemnet.plan`` and ``gpumemnet plan``: how the training of a model fits a GPU.

:func:`plan` takes a model object.  :func:`plan_file` takes a file that builds one, and plans in a
child process, so that the user's code cannot affect the caller.  This module loads no torch; the
first call does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.atomic_files import Document, from_json
from gpumemnet.cudnn.session import OFF
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.gpu import asked_profile, available_mib, with_available
from gpumemnet.launchers.launch_line import PROGRAMS_MODULE, Launch
from gpumemnet.named.catalogue import NamedModel, find_model
from gpumemnet.named.exact import stated_job, trace_options
from gpumemnet.named.fit import fit
from gpumemnet.named.methods import Method
from gpumemnet.planner.plans import (
    DEFAULT_PLANNER,
    PlanAnswer,
    PlanRequest,
    plan_answer_from_dict,
    plan_answer_to_dict,
)
from gpumemnet.sandbox.process import ask
from gpumemnet.tracing.api import (
    TraceOptions,
    TraceRequest,
    checked_request,
    checked_torch,
    factory_model,
    request_from_dict,
)
from gpumemnet.tracing.script.start import script_call, script_document
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from gpumemnet.allocator import AllocatorSettings
    from gpumemnet.gpu import DeviceProfile


def within_budget(request: TraceRequest, budget_bytes: int | None) -> TraceRequest:
    """Return ``request`` for a GPU on which this much memory is available; all of it without a
    budget.

    Raises:
        InvalidRequestError: the GPU has less.
    """
    if budget_bytes is None:
        return request
    most = available_mib(request.gpu) * MIB
    if not MIB <= budget_bytes <= most:
        raise InvalidRequestError(
            f"must be from 1 MiB to {most // MIB:,} MiB, what a process can use on {request.gpu.name}, "
            f"not {budget_bytes // MIB:,} MiB",
            "budget",
        )
    return replace(request, gpu=with_available(request.gpu, budget_bytes))


def plan(
    model: nn.Module,
    inputs: object,
    *,
    budget_bytes: int | None = None,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    planner: str = DEFAULT_PLANNER,
    host_bytes: int | None = None,
    with_alternatives: bool = True,
    optimizer: str | Optimizer | Callable[..., Optimizer] = "adamw",
    batch_size: int | None = None,
    context_mib: int | None = None,
    allocator: AllocatorSettings | None = None,
    cudnn: str = OFF,
    **options: Any,
) -> PlanAnswer:
    """Plan what a training step of ``model`` keeps, recomputes and swaps, so that it fits a GPU; no
    GPU is used.

    The model is left as it was; :func:`gpumemnet.planner.executor.applied` puts the plan in force.
    All times are modelled.

    Args:
        model, inputs, optimizer, batch_size, gpu, context_mib, allocator, cudnn: as in
            :func:`gpumemnet.trace`.
        budget_bytes: memory that the process may use; all that is available on the GPU by default.
        planner: the search, one of :data:`~gpumemnet.planner.plans.PLANNERS`.
        host_bytes: pinned host memory that swapped tensors may use; what the machine has by
            default.
        with_alternatives: whether to trace other settings of the job too, if it does not fit.
        options: further options of :func:`gpumemnet.trace` that say how the model is trained, such
            as ``loss`` and ``precision``.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidJobError, InvalidRequestError: an option has no such value, or options exclude
            each other.
        MissingExtraError: torch is not installed.
        UnsupportedTorchError: the installed PyTorch lacks what a trace needs.

    Example:
        >>> import gpumemnet, torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> gpumemnet.plan(model, torch.empty(64, 1024), gpu="A100").outcome
        'fits'
    """
    named = {"optimizer": optimizer} if isinstance(optimizer, str) else {"own_optimizer": optimizer}
    trace_options = TraceOptions(**named, **options)
    device = asked_profile(gpu, context_mib, "context_mib")
    request = PlanRequest(
        trace=within_budget(
            checked_request(trace_options, device, allocator, cudnn=cudnn),
            budget_bytes,
        ),
        planner=planner,
        host_bytes=host_bytes,
        with_alternatives=with_alternatives,
    )
    notes = checked_torch()
    from gpumemnet.extract.module_calls import as_model_inputs
    from gpumemnet.planner.plan_choice import plan_request

    return plan_request(model, as_model_inputs(inputs, batch_size), request, notes)


_LOG: Final = logging.getLogger("gpumemnet.planner")


def plan_file(factory: Document, request: PlanRequest, **limits: Any) -> PlanAnswer:
    """Plan how the model that a file builds fits the memory that is available.

    Args:
        factory: from :func:`~gpumemnet.extract.factory.factory_request`.
        request: how it is trained, on which GPU, and how to plan.
        **limits: ``deadline_seconds``, the time for everything, including the import of torch, and
            ``progress``, called with a few words at each stage.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidRequestError: options exclude each other.
        MissingExtraError: torch is not installed.
    """
    return _asked(_plan, factory["source"], factory, request, **limits)


def _asked(
    compute: Callable[[Document], object],
    source: str,
    document: Mapping[str, Any],
    request: PlanRequest,
    **options: Any,
) -> PlanAnswer:
    """The answer of a child process."""
    document = {**document, "request": asdict(request)}
    return plan_answer_from_dict(
        ask(compute, source, document, purpose="planning a training", **options)
    )


def plan_script(launch: Launch, request: PlanRequest, **limits: Any) -> PlanAnswer:
    """Plan how the model that a script trains fits the memory that is available.

    The script really runs, on a simulated GPU, up to its second optimizer step.

    Args:
        launch: the line that starts the script.
        request: the GPU, and how to plan; the script says how the model is trained.
        **limits: as in :func:`plan_file`.

    Raises:
        ExtractError: names what cannot be traced, and the line of the script.
        InvalidRequestError: the line starts several processes, or the script leaves no memory for
            its model.
    """
    if (launch.ranks or 1) > 1 or launch.script == PROGRAMS_MODULE:
        raise InvalidRequestError(
            "a plan is for one process on one GPU: plan the line that starts it, such as python train.py",
            "source",
        )
    return _asked(
        _plan_script,
        launch.script,
        script_document(launch),
        request,
        variables=launch.variables,
        **limits,
    )


def plan_named(
    name: str, request: PlanRequest, method: Mapping[str, Any], **limits: Any
) -> PlanAnswer:
    """Plan how the fine-tuning of a named model fits the memory that is available.

    Args:
        name: a hub id, a local folder, or the path of a ``config.json``.
        request: the GPU, and how to plan; the method says how the model is trained.
        method: fields of :class:`~gpumemnet.named.methods.Method`; nothing is checkpointed by
            default, because the plan says what is recomputed.
        **limits: as in :func:`plan_file`.

    Raises:
        ExtractError, InvalidRequestError, MissingExtraError: as :func:`gpumemnet.named.fit.fit` and
            :func:`plan_file`.
    """
    model = find_model(name)
    how = fit(model, gpu=request.trace.gpu, **{"checkpointing": False, **method}).method
    job = stated_job(model, how, replace(request.trace, options=trace_options(how)))
    return _asked(_plan_named, model.name, job, request, **limits)


def _plan_named(document: Document) -> Document:
    request = from_json(PlanRequest, document["request"])
    model, method = NamedModel(**document["model"]), Method(**document["method"])
    _LOG.info("importing torch and the model's library")
    notes = checked_torch()
    from gpumemnet.extract.module_calls import as_model_inputs
    from gpumemnet.named.real_model import built
    from gpumemnet.named.real_quantised import patches
    from gpumemnet.planner.plan_choice import plan_request

    real = built(model, method)
    trace = request_from_dict(document["trace"])
    options = replace(trace.options, own_optimizer=real.optimizer)
    with patches(real.module, method):
        answer = plan_request(
            real.module,
            as_model_inputs(real.inputs, method.batch_size),
            replace(request, trace=replace(trace, options=options)),
            (*notes, *real.notes),
        )
    found = plan_answer_to_dict(replace(answer, before=replace(answer.before, model=model.name)))
    plan = found["plan"]
    if plan is not None:  # the model is inside of its loss
        plan["peak_module"] = plan["peak_module"].removeprefix("model.")
        plan["units"] = [unit.removeprefix("model.") for unit in plan["units"]]
        plan["decisions"] = {
            unit.removeprefix("model."): each for unit, each in plan["decisions"].items()
        }
    return found


def _plan_script(document: Document) -> Document:
    request = from_json(PlanRequest, document["request"])
    call, notes = script_call(document, request.trace)
    from gpumemnet.planner.plan_choice import plan_request
    from gpumemnet.tracing.model_tracer import ModelTracer
    from gpumemnet.tracing.script.models import TrainedModel
    from gpumemnet.tracing.script.run import run_script
    from gpumemnet.tracing.script.script_run import result_of_script

    trained = TrainedModel()
    run = run_script(replace(call, trained=trained))
    script = result_of_script(run)
    model, inputs, options, words = trained.training(request.trace.options, run.batch_size)
    trace = replace(request.trace, options=options, allocator=run.settings)
    note = f"planned as the script trains it: {words}; the loss is its own, or one that fits its output"
    _LOG.info("tracing the model alone")
    alone = ModelTracer(model, inputs, trace).answer()
    more = script.expected_bytes - alone.expected_bytes
    if more >= MIB:
        trace = within_budget(trace, script.available_bytes - more)
        note += f". All of the script takes {more / MIB:,.0f} MiB more, which are taken off what is available"
    answer = plan_request(model, inputs, replace(request, trace=trace), (f"{note}.", *notes))
    return plan_answer_to_dict(answer)


def _plan(document: Document) -> Document:
    request = from_json(PlanRequest, document["request"])
    with factory_model(document, request.trace.options) as (model, inputs, options, guesses):
        notes = checked_torch()
        from gpumemnet.planner.plan_choice import plan_request

        trace = replace(request.trace, options=options)
        answer = plan_request(model, inputs, replace(request, trace=trace), notes)
    before = replace(answer.before, notes=(*guesses.notes, *answer.before.notes))
    return plan_answer_to_dict(replace(answer, before=before))
