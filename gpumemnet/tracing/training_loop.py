"""The training loop that is traced: build the model, alone on its GPU or as one of several replicas
or shards, then run forward pass, loss, backward pass and optimizer, without a GPU.

The batch is copied from the host for every microbatch.  Batch, output and loss stay alive until the
next step replaces them, as in most loops, or until the step ends, as in the loop that the dataset
builder measures.  Gradients are dropped (``set_to_none``) where ``zero_grad`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from gpumemnet.errors import ExtractError, GpumemnetError
from gpumemnet.extract.checkpointing import checkpointed
from gpumemnet.extract.module_calls import (
    MetaTensors,
    ModelInputs,
    ModulePath,
    tensors_in,
    with_meta_tensors,
)
from gpumemnet.extract.placement import MissingValues, placement
from gpumemnet.launchers.rank_program import gathered_in, on_rank
from gpumemnet.physics.element_types import (
    AUTOCAST_TYPES,
    IMAGE_DIMENSIONS,
    MODEL_TYPES,
    SCALED_PRECISIONS,
)
from gpumemnet.sandbox.user_code import fault_sentence
from gpumemnet.torch_private.names import (
    part_on_rank,
    unscale_gradients,
    without_function_modes,
)
from gpumemnet.torch_private.training import without_dynamo
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.losses_and_optimizers import (
    Loss,
    TargetLoss,
    loss_function,
    loss_name,
    optimizer_factory,
)
from gpumemnet.tracing.missing_values import GuessedValues
from gpumemnet.tracing.operators.autocast import cuda_kernels
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script.simulated_cuda import Streams
from gpumemnet.tracing.timeline import Timeline

_NAMES: Final = (
    "batch, output and loss of a step live until the next step replaces them, as in most loops; "
    "keeps_names=False is for a loop that calls a function for each step."
)
AUTOCAST: Final = {name: getattr(torch, type_) for name, type_ in AUTOCAST_TYPES.items()}
"""Precision with autocast → the type that autocast computes in."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A traced run.

    Attributes:
        timeline: allocations and releases.
        loss: name of the loss that was used.
        notes: one sentence for each assumption.
    """

    timeline: Timeline
    loss: str
    notes: tuple[str, ...]


def record(
    model: nn.Module,
    inputs: ModelInputs,
    options: TraceOptions,
    platform: Platform,
    *,
    corrected: bool = True,
    new_recorder: Callable[..., Recorder] = Recorder,
) -> Recording:
    """Run two optimizer steps of ``model`` on meta tensors and record every storage, so that
    optimizer state and the gradients of the previous step exist.

    The model is left as it was.

    Args:
        model: the model, on any device.
        inputs: what it is called with.
        options: how it is trained.
        platform: the GPU that the job will run on.
        corrected: whether to correct the differences between CUDA and meta tensors; ``False`` for a
            baseline.
        new_recorder: makes the recorder, which may record more than storages.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidRequestError: an option has no such value.
        PlanError: a plan is applied to the model that would change what it computes.
    """
    modes = {module: module.training for module in model.modules()}
    missing_values = GuessedValues()
    run = _TrainingRun(model, inputs, options, platform, missing_values, new_recorder)
    try:
        with torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(
                placement(missing_values, run.recorder.requested, run.recorder.holds)
            )
            stack.enter_context(without_dynamo())
            if corrected:
                stack.enter_context(cuda_kernels(platform))
            model.train()
            if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
                run.phase = "the forward pass that initializes lazy modules"
                model(*inputs.args, **inputs.kwargs)
            dtype = (
                getattr(torch, MODEL_TYPES[options.precision])
                if options.precision in MODEL_TYPES
                else None
            )
            meta_tensors = stack.enter_context(
                with_meta_tensors(model, dtype, options.channels_last)
            )
            if options.checkpointing == "every_block":
                stack.enter_context(checkpointed(model))
            whole, last = inputs.batch_size, options.last_batch_size
            run.train(meta_tensors, [whole, whole] + ([last, whole] if last else []))
    except GpumemnetError:
        raise
    except Exception as error:
        within = f" (in module '{run.path}')" if run.path else ""
        raise ExtractError(
            f"{run.phase} fails: {fault_sentence(error)}{within}{inputs.shapes_of_fault(error)}"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    notes = (*run.notes, *missing_values.notes)
    return Recording(run.recorder.timeline(), run.loss_text, notes)


class _TrainingRun:
    """The state of a run: its phase, and the shapes of its targets."""

    def __init__(
        self,
        model: nn.Module,
        inputs: ModelInputs,
        options: TraceOptions,
        platform: Platform,
        missing_values: MissingValues,
        new_recorder: Callable[..., Recorder],
    ) -> None:
        self._model = self._model_on_rank = model
        self._missing_values = missing_values
        self._options = options
        self._inputs = _cast(inputs, options)
        self._loss: Loss = loss_function(options.loss)
        self._targets: list[tuple[torch.Size, torch.dtype]] = []
        self._targets_left: list[Tensor] = []
        self._new_targets: list[Tensor] = []
        self._batch_event = 0
        self._owners: dict[int, str] = {}
        self._kept_alive: dict[str, object] = {}
        self._first_batch = self._inputs
        self._gathered_type = gathered_in(model, options.parallel, AUTOCAST.get(options.precision))
        self._modules = modules = ModulePath(model)
        self.recorder = new_recorder(modules, platform)
        self.phase = "the model's construction"
        self.loss_text = ""
        self.notes = [_NAMES] if options.keeps_names else []

    @property
    def path(self) -> str:
        """Path of the innermost module that is or was running."""
        return self._modules.path

    def train(self, meta_tensors: MetaTensors, batch_sizes: Sequence[int]) -> None:
        """Build the model, and train for one step with each of ``batch_sizes``."""
        recorder, options = self.recorder, self._options
        if not any(parameter.requires_grad for parameter in meta_tensors.parameters.values()):
            raise ExtractError(
                "the model has no parameter that requires a gradient: nothing would be trained"
            )
        recorder.begin("build")
        on_gpu = on_rank(
            self._model,
            meta_tensors,
            recorder,
            Streams(recorder.use_stream),
            options.parallel,
            options.ranks,
            self._gathered_type,
        )
        with self._modules, recorder, on_gpu as rank:
            self._model_on_rank, self._owners = rank.model, rank.owners
            self.notes += rank.notes
            new_optimizer = optimizer_factory(options, rank.parameters)
            trained = [p for p in rank.parameters.values() if p.requires_grad]
            scaler = _Scaler(recorder) if options.precision in SCALED_PRECISIONS else None
            self._run_forward_first(options.forward_passes_first)
            optimizer = new_optimizer(trained)  # some optimizers allocate their state here
            self._classify_state(optimizer)
            for batch_size in batch_sizes:
                recorder.begin_step()
                self._step(optimizer, scaler, trained, batch_size)
        recorder.close()
        self._kept_alive.clear()

    def _run_forward_first(self, forward_passes: int) -> None:
        """Run forward passes on one batch, which stays alive."""
        if forward_passes:
            self._first_batch, _ = self._batch(self._inputs.batch_size)
        for _ in range(forward_passes):
            with self._autocast():
                self._model_on_rank(*self._first_batch.args, **self._first_batch.kwargs)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: _Scaler | None,
        trained: list[nn.Parameter],
        batch_size: int,
    ) -> None:
        options, recorder = self._options, self.recorder
        if options.zero_grad == "before_forward":
            optimizer.zero_grad(set_to_none=True)
        for micro_batch in range(options.gradient_accumulation):
            batch = targets = None
            self._begin("forward", "the forward pass")
            batch, targets = self._batch(batch_size)
            self._keep_alive("batch", (batch, targets))
            self._targets_left = list(targets)
            self._batch_event = recorder.now()
            with self._autocast():
                output = self._model_on_rank(*batch.args, **batch.kwargs)
                self._keep_alive("output", output)
                self.phase = "the loss"
                loss = self._loss(output, self._target)
                if options.gradient_accumulation > 1 or isinstance(
                    options.loss, TargetLoss
                ):  # the measured loop always divides
                    loss = loss / options.gradient_accumulation
                self._keep_alive("loss", loss)
            targets += self._new_targets
            self._new_targets.clear()
            if not self.loss_text:
                self.loss_text = loss_name(options.loss, output)
            if options.zero_grad == "before_backward" and micro_batch == 0:
                optimizer.zero_grad(set_to_none=True)
            self._begin("backward", "the backward pass")
            torch.autograd.backward(scaler.scale(loss) if scaler else loss)
            for parameter in trained:
                if parameter.grad is not None:
                    recorder.classify(
                        (part_on_rank(parameter.grad),), "gradient", self._owners[id(parameter)]
                    )
        self._begin("optimizer", "the optimizer's step")
        if scaler:
            scaler.unscale(trained)
        if options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, options.clip_norm)
        with self._missing_values.stepping(optimizer):
            optimizer.step()
        self._classify_state(optimizer)
        if options.zero_grad == "after_step":
            optimizer.zero_grad(set_to_none=True)

    def _classify_state(self, optimizer: torch.optim.Optimizer) -> None:
        for owner, state in optimizer.state.items():
            self.recorder.classify(
                map(part_on_rank, tensors_in(state)),
                "optimizer_state",
                self._owners.get(id(owner), ""),
            )

    def _keep_alive(self, name: str, value: object) -> None:
        """Keep ``value`` alive until the next step replaces it, if the options say so."""
        if self._options.keeps_names:
            self._kept_alive[name] = value

    def _begin(self, phase: str, words: str) -> None:
        self.recorder.begin(phase)
        self.phase = words

    def _batch(self, batch_size: int) -> tuple[ModelInputs, list[Tensor]]:
        """Return new inputs and targets on the GPU with ``batch_size`` samples."""
        whole = self._inputs.batch_size

        def arrive(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            is_converted = self._options.channels_last and len(shape) == IMAGE_DIMENSIONS
            layout = torch.channels_last if is_converted else torch.contiguous_format
            fresh = torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)
            self.recorder.arrived(fresh, "input", "")
            return fresh

        def arrive_input(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return arrive(tensor.shape, tensor.dtype)
            with (
                without_function_modes()
            ):  # small whole numbers keep their values, because models read them
                fresh = tensor.clone()
            self.recorder.arrived(fresh, "input", "")
            return fresh

        inputs = self._inputs.resized(batch_size).mapped(arrive_input)
        targets = []
        for (first, *others), dtype in self._targets:  # [samples, …], or [samples · tokens, …]
            targets.append(arrive(torch.Size((first * batch_size // whole, *others)), dtype))
        return inputs, targets

    def _target(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a target of the batch.

        It arrives with the inputs, although in the first step its shape is known only when the loss
        asks for it.
        """
        if self._targets_left:
            return self._targets_left.pop(0)
        if (
            dtype.is_floating_point
            and self._options.precision in AUTOCAST
            and not isinstance(self._options.loss, TargetLoss)
        ):
            dtype = (
                torch.float32
            )  # the type is that of the model's output; autocast changes that, not the data
        self._targets.append((shape, dtype))
        with without_function_modes():  # the model's code does not request it
            target = torch.empty(shape, dtype=dtype, device="meta")
        self.recorder.arrived(target, "input", "", self._batch_event)
        self._batch_event += 1
        self._new_targets.append(target)
        return target

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST.get(self._options.precision)
        return (
            nullcontext()
            if dtype is None or self._gathered_type is not None
            else torch.autocast("cuda", dtype=dtype)
        )


class _Scaler:
    """Allocates what ``torch.amp.GradScaler`` does: its scale, and a few scalars in each step
    (``torch/amp/grad_scaler.py``)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._scale: Tensor | None = None
        self._growth: Tensor | None = None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        if self._scale is None:
            self._scale, self._growth = (
                torch.empty((), dtype=t, device="meta") for t in (torch.float32, torch.int32)
            )
            for tensor in (self._scale, self._growth):
                self._recorder.arrived(tensor, "optimizer_state", "")
        return loss * self._scale

    def unscale(self, trained: list[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        assert self._scale is not None
        inverse = self._scale.double().reciprocal().float()
        found = torch.empty((), device="meta")
        self._recorder.arrived(found, "temporary", "")
        unscale_gradients([p.grad for p in trained if p.grad is not None], found, inverse)


def _cast(inputs: ModelInputs, options: TraceOptions) -> ModelInputs:
    """Return ``inputs`` in the precision of the model."""
    if options.precision not in MODEL_TYPES:
        return inputs
    dtype = getattr(torch, MODEL_TYPES[options.precision])
    return inputs.mapped(
        lambda tensor: (
            torch.empty_like(tensor, dtype=dtype) if tensor.is_floating_point() else tensor
        )
    )
