"""Observes a training script: which modules run, when phases begin, and when two steps are done."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import inf, prod
from time import process_time
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import get_worker_info

from gpumemnet.extract.known_layouts import meta_like
from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.sandbox.process import DeadlineReached, shorten_alarm
from gpumemnet.torch_private.names import (
    Arguments,
    Keywords,
    dense_parts,
    id_of_storage,
    leaves_of,
    part_on_rank,
    replaced,
    storage_id,
    storage_of,
    value_of,
    without_function_modes,
)
from gpumemnet.torch_private.script import DECORATE, MODULE_CALL
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script.counters import Counters, Progress
from gpumemnet.tracing.script.drawn_numbers import extreme_draws, replaced_draws
from gpumemnet.tracing.script.libraries import take_from_gpu
from gpumemnet.tracing.script.look_ahead import Looked
from gpumemnet.tracing.script.loops import Loops
from gpumemnet.tracing.script.models import (
    GENERATION,
    Generation,
    ModelTensors,
    SampleCount,
    ScriptModules,
    TrainedModel,
)
from gpumemnet.tracing.script.optimizers import STEPS, Optimizers, parameters_of
from gpumemnet.tracing.script.repeated_passes import RepeatedPasses
from gpumemnet.tracing.script.simulated_cuda import Streams, swap_for_meta
from gpumemnet.tracing.script.whole_run import (
    LATER_SECONDS,
    MORE_EVENTS,
    MORE_EVENTS_OF_GENERATION,
    MORE_SECONDS,
    MORE_STEPS,
    REST_SECONDS,
    REST_STEPS,
    STEPS_OF_ANOTHER,
    Loaders,
    WholeRun,
)
from gpumemnet.tracing.timeline import Timeline

_BEFORE: Final = 3
"""How much more time there is as long as the optimizer of most parameters has not stepped."""
_SECONDS_ON_HOST: Final = 10.0
"""CPU time after its first optimizer step after which a script that trains nothing on the GPU is
stopped: before its training, it may show an optimizer or train something small."""
_PASSES_ON_HOST: Final = 100
"""The same in backward passes, where there is no optimizer: their loop may wait for a small loss."""
_PASSES: Final = 4
"""Backward passes after which a script without an optimizer is ended: such a script may take
several for one step."""
_GPU: Final = torch.device("cuda", 0)
_HOST: Final = torch.device("cpu")
_META: Final = torch.device("meta")


class EnoughSteps(BaseException):
    """Raised to end the script after enough steps."""


class ScriptObserver:
    """The state of a running script.

    Args:
        platform: the simulated GPU.
        run: runs an operator with its arguments.
        more_seconds: longest time for the whole run after its first steps.
        resized: a batch size, and the one to put in its place.
        used: called before anything arrives on the GPU.
        trained: takes the model that the script trains out of the run, if it is wanted.
        passes: called before a backward pass, for which PyTorch starts threads.
    """

    def __init__(
        self,
        platform: Platform,
        run: Callable[[Any, Arguments, Keywords], Any],
        more_seconds: float,
        resized: tuple[int, int] | None,
        used: Callable[[], None],
        trained: TrainedModel | None,
        passes: Callable[[], None],
    ) -> None:
        self._used = used
        self.seen: Callable[[], None] = lambda: None
        """Called once the first steps, and those that follow, are over."""
        self._passes = passes
        self._trained = trained
        self.more_seconds = more_seconds
        self.modules = ScriptModules(self._model_starts)
        self.recorder = Recorder(self.modules, platform, run=run)
        self.modules.left = self._left
        self.streams = Streams(self.recorder.use_stream)
        self.notes: dict[str, str] = {}
        self.error = ""
        """What has ended the script, if that was an error."""
        self._platform = platform
        self._tensors = ModelTensors(self.recorder, self.modules)
        self._boundary: Callable[[], Optimizer | None] = lambda: None
        """The optimizer whose steps are counted, unless the script has dropped it."""
        self.boundaries = 0
        """How many steps have ended."""
        self._were_on_gpu: set[int] = set()
        """Parameters that have left the GPU, and may be back."""
        self.optimizers = Optimizers(
            self.recorder,
            lambda each: self.device_of(each) == _GPU or id(each) in self._were_on_gpu,
        )
        self._deferred: dict[int, torch.UntypedStorage] = {}
        self._started = False
        self._stepping = False
        self._trains_on_gpu = self._passed_on_gpu = False
        self._passes_on_host = 0
        self._stepped_at = 0.0
        """CPU time of the first step on the host."""
        self._has_optimizer = False
        self.held: list[Optimizer] = []
        """The optimizers at the end of the run, which would go with the script's frames."""
        self.is_lower_bound = False
        """Whether time was up before enough steps."""
        self.comes_again: list[int] = []
        """Events from which all comes again."""
        self._passing = False
        self._has_graph = False
        """Whether a pass with gradients waits for its backward pass: others are a part of it."""
        self.first: Timeline | None = None
        """The record of the first steps, once they are over."""
        self.loaders = Loaders(
            lambda: self.first is not None,
            self.recorder.live_bytes,
            self._gives,
            resized,
            self.recorder.holds,
            lambda: len({*self.shapes.values()}) > 1,
        )
        self._samples = SampleCount(self.loaders.batch_sizes)
        self.step_names: dict[int, str] = {}
        """Step → the batch that it trains on, where that was chosen."""
        self._first_model: weakref.ref[nn.Module] | None = None
        self.shapes: dict[int, str] = {}
        """Step → shapes of what the first model was called with in training."""
        self._inputs: list[torch.Size] = []
        """Shapes of what was moved to the GPU since the last step."""
        self.generation = Generation()
        self.progress = Progress(
            lambda: bool(self.modules.depth) or self._passing or self._stepping,
            lambda: (self.optimizers.steps or self.boundaries, self.optimizers.made),
            lambda: (self.loaders.batches, self.loaders.epoch_batches),
            lambda: bool(self.loaders.known),
        )
        self.counters = Counters(self.recorder, self.progress)
        self.drawn_by = extreme_draws(self.progress)
        self.loops = Loops(
            self.recorder,
            self.counters,
            lambda: self.generation.phase == GENERATION,
            self.loaders.number_of,
            (EnoughSteps, DeadlineReached, Looked),
        )
        self._repeated = RepeatedPasses(
            self.recorder,
            lambda: not self.modules.depth,
            self._model_starts,
            self.progress.trained,
        )
        self._in_engine = self._has_engine = False
        self._trains_another = False
        """Whether an optimizer was made once the script had trained for as long as is wanted."""
        self._end = self._counted_from = 0
        self._counted_at = 0.0
        self._ended = 0, process_time()
        self._least_step = inf, 0
        """Events and CPU time at the end of the last step; the least time, and events, of a step."""

    @property
    def has_enough_steps(self) -> bool:
        """Whether the script has trained for as many steps as a trace takes."""
        return self.first is not None or self.boundaries >= self._steps_wanted

    @property
    def has_stepped(self) -> bool:
        """Whether the script has trained on the GPU for one step, or is taken to have."""
        return self.boundaries > 0 and (self._trains_on_gpu or not self._has_optimizer)

    @property
    def trains_on_host(self) -> bool:
        """Whether optimizers have stepped on the host alone."""
        return not self._trains_on_gpu and self.optimizers.steps > 0

    @property
    def _steps_wanted(self) -> int:
        return STEPS + (len(self.optimizers.stepped) > 1) if self._has_optimizer else _PASSES

    # Called by the simulated GPU; see :mod:`gpumemnet.tracing.script.gpu`.

    def device_of(self, tensor: Tensor) -> torch.device:
        """The device of a tensor, meta or real: a meta tensor that is not on the GPU stands for a
        weight on the host."""
        held = part_on_rank(tensor)
        if self.recorder.holds(held):
            return _GPU
        if not tensor.is_meta:
            return tensor.device
        if held.layout != torch.strided:
            return _HOST if dense_parts(held) else _GPU
        if held.numel() and not storage_of(held).nbytes():  # freed, to be allocated again
            return _GPU
        return _META if storage_id(held) in self._deferred else _HOST

    def arrived(self, tensor: Tensor, operator: str, *, is_weight: bool = False) -> None:
        """An input or a copy of a weight has arrived from the host, or a tensor was allocated on
        the GPU."""
        self._used()
        for part in dense_parts(part_on_rank(tensor)):
            if is_weight:
                self.recorder.arrived(part, "buffer")
            elif operator == "to" and self.modules.running is None:
                self.recorder.arrived(part, "input", "")
                self._inputs.append(part.shape)
            else:
                self.recorder.requested(part, operator)
                # A model may join the samples itself.
                if operator == "to" and not self._inputs and torch.is_grad_enabled():
                    self._inputs.append(part.shape)
                    self._begins_with(part.numel())

    def _begins_with(self, size: int) -> None:
        """End the round of a loop that looks ahead, unless its batch is the largest.

        Raises:
            Looked: it ends.
        """
        if size and self.loops.ahead.ends_round(size):
            self._inputs.clear()
            self.modules.forget()
            raise Looked

    def module_arrived(self, module: nn.Module) -> None:
        """A model, or a part of one, is moved to the GPU."""
        self._used()
        self.modules.learn(module)

    def module_left(self, tensors: list[Tensor]) -> None:
        """A model, or a part of one, is moved to the host: its passes allocate something else."""
        self._were_on_gpu.update(map(id, tensors))
        self._repeated.forget()

    def module_tensor(self, tensor: Tensor, owner: nn.Module, is_parameter: bool) -> None:
        """A parameter or a buffer of ``owner`` has arrived."""
        path = self.modules.path_of(owner)
        if isinstance(tensor, nn.Parameter):
            self._tensors.know(tensor, path)
        self.recorder.arrived(tensor, "parameter" if is_parameter else "buffer", path)

    def deferred(self, tensor: Tensor) -> None:
        """The script allocates a weight on the meta device: it takes no memory until it is
        moved."""
        storage = storage_of(tensor)
        self._deferred[id_of_storage(storage)] = storage

    def stays_deferred(self, given: Tensor, result: object) -> None:
        """The script computes ``result`` from such a weight: it is on the meta device too."""
        if not given.is_meta or not isinstance(result, Tensor) or not result.is_meta:
            return
        if self.device_of(given) == _META and self.device_of(result) == _HOST:
            self.deferred(result)
            self.recorder.host.left(storage_of(result))

    def on_host(self, module: nn.Module) -> None:
        """Weights of a module take memory on the host from now on."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._deferred.pop(storage_id(tensor), None)
            self.recorder.host.allocated(tensor.untyped_storage())

    def sharded_tensor(self, tensor: Tensor, is_parameter: bool) -> None:
        """An unsharded parameter or buffer has arrived, to be split among the ranks at once."""
        with without_function_modes():  # the script sees a CUDA tensor
            if self.device_of(tensor).type == "cpu":  # others may hold its storage there
                swap_for_meta(tensor, meta_like(tensor))
            self._used()
            if storage_id(tensor) not in self._deferred:
                self.recorder.arrived(tensor, "parameter" if is_parameter else "buffer", "")

    def graph_runs(self, arguments: object) -> None:
        """A compiled function has run, in which no module was seen."""
        given = [tensor for tensor in tensors_in(arguments) if tensor.ndim]
        if not self.modules.depth and given and self.recorder.has_live_storages:
            self._samples.known = self._samples.known or given[0].shape[0]

    def saves(self) -> None:
        """The script saves, or gathers what it saves."""
        if self.first is not None and self.recorder.phase != "saving":
            self._begin("saving")

    # Called by engines of other libraries, see :mod:`gpumemnet.launchers.deepspeed_engine`.

    def engine_runs(self) -> AbstractContextManager[object]:
        """Context in which an engine steps optimizers of its own: no step of the script ends."""
        self._has_engine = True
        return patch.object(self, "_in_engine", True)

    def engine_steps(self, optimizer: Optimizer, step: Callable[[], None]) -> None:
        """An engine steps, whose optimizer may be on the host."""
        self._stepping = True
        self._begin("optimizer")
        with self.engine_runs():
            step()
        self._trains_on_gpu |= self.recorder.has_live_storages
        self._after_step(optimizer, (), {})

    # Called by PyTorch.

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context in which backward passes and optimizer steps are noticed."""
        backward: Callable[..., None] = torch.autograd.backward
        gradients: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.grad
        make_optimizer: Callable[..., None] = Optimizer.__init__

        def observed_backward(*args: Any, **kwargs: Any) -> None:
            is_inner = self._passing  # of a checkpointed part, say
            with self._backward_pass(tensors_in(args)):
                backward(*args, **kwargs)
                if not is_inner:
                    self._tensors.classify_gradients(of_engine=self._has_engine)

        def observed_gradients(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
            if (
                self._has_optimizer or self._passing
            ):  # a term of the loss, such as a gradient penalty
                return gradients(*args, **kwargs)
            with self._backward_pass(tensors_in(args[:1])):
                result = gradients(*args, **kwargs)
                self.recorder.classify(map(part_on_rank, tensors_in(result)), "gradient", "")
            return result

        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if not self._has_optimizer:
                self._has_optimizer, self.boundaries = True, 0
                self.notes.pop("optimizer", None)
            if not self.optimizers.is_counting:
                self.optimizers.add(optimizer)
                self.loaders.is_over = self.loaders.is_over and False
            make_optimizer(optimizer, *args, **kwargs)
            self.optimizers.is_made(optimizer)
            is_another = self.progress.has_trained and not self.optimizers.is_counting
            if is_another and not self._trains_another:
                self._trains_another = True
                self._begin_rest()

        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            with (
                replaced(
                    [
                        ("torch.autograd:backward", observed_backward),
                        ("torch.autograd:grad", observed_gradients),
                        ("torch.optim:Optimizer.__init__", made),
                        (MODULE_CALL, self._repeated.around(value_of(MODULE_CALL))),
                        (DECORATE, self._repeated.around_decorator(value_of(DECORATE))),
                        *replaced_draws(self.drawn_by),
                    ]
                ),
                self.modules,
                self.loaders.observing(),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _backward_pass(self, outputs: Sequence[Tensor]) -> Iterator[None]:
        """Context of a backward pass from ``outputs``; without an optimizer, it ends a step."""
        self._passes()
        is_outermost = not self._passing
        self._passes_on_host += not (self._has_optimizer or self.recorder.now())
        if self._passes_on_host > _PASSES_ON_HOST:
            raise EnoughSteps
        # A copy of the model may be on the host, which gets the gradients and is stepped there.
        self._passed_on_gpu |= any(self.device_of(each) == _GPU for each in outputs)
        if is_outermost and not self._started and self.recorder.has_live_storages:  # no module ran
            self._started = True
            self.recorder.begin_step()
        leaves = []
        if is_outermost and not (self._has_optimizer and self._samples.known):
            leaves = list(leaves_of(outputs))
            self._samples.settle(set(map(id, leaves)))
        if is_outermost and not self._has_optimizer:
            self._tensors.learn(leaves)
            self._tensors.classify_models()
        self._passing = True
        try:
            self._begin("backward")
            yield
        finally:
            self._passing = not is_outermost
        if is_outermost and self._started and not self._has_optimizer:
            self.notes["optimizer"] = (
                "no optimizer was found: a step is taken to end with a backward pass"
            )
            self._end_step()
        self._begin("optimizer" if self._stepping else "forward")

    def _end_step(self) -> None:
        """End a step, and the script after the steps of its whole run."""
        self.boundaries += 1
        if self.boundaries == 1:
            gc.collect()  # as a run does soon: networks that only refer to themselves are gone
        (events, seconds), self._ended = self._ended, (self.recorder.now(), process_time())
        step = self._ended[1] - seconds, self._ended[0] - events
        self._least_step = min(step, self._least_step)  # others may evaluate, too
        self._inputs.clear()
        self.loaders.trained()
        if self.loaders.is_over is False:  # a library trains another network
            self.loaders.is_over = self.optimizers.steps_since_made > STEPS_OF_ANOTHER
        self.recorder.classify_kept()
        if self.has_enough_steps and self.first is None:
            self.first = self.recorder.timeline()
            self.optimizers.freeze()
            self._counted_from, self._counted_at = self.recorder.now(), process_time()
            self.progress.has_stepped = True
            self.seen()
            self._end = self.boundaries + MORE_STEPS
            shorten_alarm(self.more_seconds, self.loops.goes_on)
        self._end_whole_run(self.boundaries >= self._end)
        self.recorder.begin_step()

    def _end_whole_run(self, is_over: bool = False) -> None:
        """End the script if enough of its whole run was seen."""
        if self.first is None or get_worker_info() is not None:  # a module that transforms data
            return
        events = self.recorder.now() - self._counted_from
        is_long = self.recorder.phase == GENERATION or self.progress.has_trained
        most = MORE_EVENTS_OF_GENERATION if is_long else MORE_EVENTS
        most = max(most, REST_STEPS * self._least_step[1] * self.progress.has_trained)
        seconds = process_time() - self._counted_at
        is_late = seconds > self.more_seconds / 2 and not self.progress.has_trained  # slow steps
        is_enough = (
            (events > most or is_late)
            and seconds > min(MORE_SECONDS, self.more_seconds / 2)
            and not self.optimizers.has_single_steps
        )
        if not (is_enough or (is_over and not self.progress.has_trained)):
            return
        if self.progress.has_trained:
            raise EnoughSteps
        self.seen()
        self.progress.has_trained = True
        # The loaders of a library that trains can end, and so its epochs.
        if self.loops.trains or self.loaders.known:
            self.loaders.is_over = not self.loops.trains or None
            self.loaders.seconds = LATER_SECONDS
            self._counted_from, self._counted_at = self.recorder.now(), process_time()
            self._begin_rest()
            return
        raise EnoughSteps

    def _begin_rest(self) -> None:
        """What follows the steps has time of its own from now on."""
        slow = min(REST_STEPS * self._least_step[0], REST_STEPS // 2 * self.more_seconds)
        seconds = max(min(REST_SECONDS, 2 * self.more_seconds), slow) or REST_SECONDS
        # An evaluation may have trained a probe, before the script trains its network.
        seconds *= _BEFORE if self.optimizers.largest_waits else 1
        shorten_alarm(seconds, self.loops.goes_on)

    def _gives(self, what: str) -> None:
        """A data loader gives a batch that was chosen: the next step trains on it."""
        if torch.is_grad_enabled():
            self.step_names[self.boundaries + 1] = what

    def whole_run(self) -> WholeRun | None:
        """Return what the run has shown after its first steps; ``None`` if it had none."""
        if self.first is None:
            return None
        left, sentences = self.optimizers.left(self.boundaries)
        sentences = [*self.loaders.unread, *sentences]
        shapes = defaultdict[Any, Counter[str]](Counter)  # by what trains on them
        for step, each in self.shapes.items():
            if step not in self.step_names:
                shapes[frozenset(self.optimizers.steppers[step])][each] += 1
        different = max(shapes.values(), key=len, default=Counter())
        is_met = self.loops.ahead.met_longest or "the longest batch" in self.step_names.values()
        # Where most have the largest, the others are the last of an epoch.
        largest = max(
            different, key=lambda each: prod(map(int, re.findall(r"\d+", each))), default=""
        )
        is_met |= 2 * different[largest] > different.total()
        if len(different) > 1 and (self.loaders.has_drawn or not is_met):
            sentences.append(
                f"batches have different shapes ({'; '.join([*different][:3])}): "
                "the largest that was seen counts, and a larger one takes more"
            )
        for optimizer in self.optimizers:
            self.optimizers.learn_state(optimizer)
        return WholeRun(
            self.recorder.timeline(),
            self.boundaries,
            self.step_names,
            left,
            tuple(sentences),
            self.optimizers.made_after,
            self.counters.sizes,
            self.loops.queues,
            self.loops.kept,
            self.comes_again,
        )

    def _model_starts(self, arguments: Any = ()) -> None:
        if torch.is_grad_enabled():
            with without_function_modes():  # which take time
                given = sum(each.numel() for each in tensors_in(arguments))
            self._begins_with(given or sum(map(prod, self._inputs)))
        self._end_whole_run()
        self.recorder.begin_pass()
        if self.first is not None and not self._stepping:
            is_forward = self._has_graph or torch.is_grad_enabled()
            phase = "forward" if is_forward else self.generation.phase
            if not self._passing and phase != self.recorder.phase:
                self._begin(phase)
        elif not self._started and torch.is_grad_enabled() and self.recorder.has_live_storages:
            self._started = True
            self.recorder.begin_step()
            self._begin("forward")
        elif self._stepping:  # in the optimizer's closure
            self._begin("forward")

    def _left(self, module: nn.Module, arguments: Any, output: object) -> None:
        self.recorder.left_module(module, arguments, output)
        if not self.modules.depth and torch.is_grad_enabled():
            self._has_graph |= any(each.requires_grad for each in tensors_in(output))
        step = self.boundaries + 1
        is_model = not self.modules.depth and next(iter(module.parameters()), None) is not None
        if is_model and not torch.is_grad_enabled():
            self.generation.passed(module, arguments, self.recorder.live_bytes())
        if is_model and torch.is_grad_enabled() and self._started:
            shapes = [each.shape for each in _given(arguments)]
            given = shapes or self._inputs  # which the script has set beforehand
            if {each.requires_grad for each in tensors_in(output)} == {False}:  # samples of it
                given = []
            shape = ", ".join("x".join(map(str, each)) for each in given)
            if self._trained is not None:
                self._trained.called(module, arguments)
            if given:
                self._first_model = self._first_model or weakref.ref(module)
                if self._first_model() is module:
                    self.shapes[step] = shape
        if self._samples.known is None and self._started:
            self._samples.learn(module, _given(arguments), is_model=not self.modules.depth)

    @property
    def batch_size(self) -> int | None:
        """Samples that the model got in training, as far as that is known: what it got may be nodes
        of graphs, points of rooms, or a part of a batch."""
        known, sizes = self._samples.batch_size, self.loaders.trained_sizes - {0, 1}
        is_told = known in self.loaders.batch_sizes or len(sizes) != 1
        return known if is_told else max(sizes)

    def _begin(self, phase: str) -> None:
        self._has_graph &= phase == "forward"
        cudnn: Any = torch.backends.cudnn
        tf32 = cudnn.conv.fp32_precision == "tf32"  # the older name fails once this one is set
        self.recorder.use_platform(
            replace(self._platform, cudnn_benchmark=cudnn.benchmark, tf32=tf32)
        )
        if self._started:
            self.recorder.begin(phase)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.optimizers.is_counting:
            return
        take_from_gpu(optimizer, partial(self.notes.setdefault, "paged"))
        self.optimizers.begin_step(optimizer)
        if not self._in_engine:
            self._stepping = True
            self._begin("optimizer")

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.optimizers.is_counting:
            return
        if assumed := self.optimizers.fill(optimizer):
            self.notes["LBFGS"] = assumed
        self._tensors.classify(optimizer, of_engine=self._has_engine)
        if self._in_engine:
            return
        self._stepping = False
        if self._trained is not None:
            self._trained.stepped(optimizer)
        parameters = parameters_of(optimizer)
        with without_function_modes():  # which take time
            self._trains_on_gpu |= self._passed_on_gpu or any(  # shards may wait on the host
                self.device_of(each) == _GPU or hasattr(each, "device_mesh") for each in parameters
            )
            # Without gradients it trains nothing, such as where a script shows its learning rates.
            has_trained = self._trains_on_gpu or any(each.grad is not None for each in parameters)
        self.optimizers.end_step(optimizer, self.boundaries + 1, has_trained=has_trained)
        if self.trains_on_host:
            self._stepped_at = self._stepped_at or process_time()
            if process_time() > self._stepped_at + _SECONDS_ON_HOST:
                raise EnoughSteps
        if self._boundary() is None and self._trains_on_gpu:
            self._boundary = weakref.ref(optimizer)
        if optimizer is self._boundary() and self._started:
            self._end_step()
        elif not self._started and any(each.grad is not None for each in parameters):
            self._started = True  # the script computes gradients itself, as evolution strategies do
            self.recorder.begin_step()
        self._begin("forward")


def _given(arguments: Any) -> list[Tensor]:
    """The tensors that a module is called with, also as attributes of an object."""
    objects = [getattr(each, "__dict__", None) for each in arguments[0]]
    return [each for each in tensors_in(arguments) or tensors_in(objects) if each.ndim]
