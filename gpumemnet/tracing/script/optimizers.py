"""The optimizers of a script: which of them are one, how often each has stepped, which storages hold
their state, and what those would take that have not stepped as often as is traced.

A script may make an optimizer anew for the same parameters, as for each fold or client: both have
one key.  Two that are there beside each other have two.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from itertools import takewhile
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.torch_private.script import unseen
from gpumemnet.torch_private.training import fill_history, history_of_first_step
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.units import MIB

STEPS: Final = 2
"""Optimizer steps that are traced for the steady state."""
_KERNELS: Final = ("fused", "foreach", "capturable")
"""Settings of an optimizer that do not change its state."""


class Optimizers:
    """Those that the script has made and not dropped.

    Args:
        recorder: records what is on the GPU.
        was_on_gpu: whether a parameter is on the GPU, or was.

    Attributes:
        stepped: key → steps.
        is_counting: whether an optimizer steps to count its state, and not for the script.
    """

    def __init__(self, recorder: Recorder, was_on_gpu: Callable[[Tensor], bool]) -> None:
        self._recorder, self._was_on_gpu = recorder, was_on_gpu
        self.stepped: Counter[int] = Counter()
        self.is_counting = False
        self._made: list[weakref.ref[Optimizer]] = []
        self._made_at = 0
        self._made_events: dict[int, int] = {}
        """Key → the event after which it was made."""
        self.steppers: defaultdict[int, set[int]] = defaultdict(set)
        """Step → keys of those that stepped in it."""
        self._states: dict[int, tuple[int, ...]] = {}
        """Key → numbers of the storages that hold its state."""
        self._frozen: set[int] = set()
        """Identities of parameters that do not train in the first steps."""
        self._trained = Counter[int]()
        """Key → for how many parameters an optimizer keeps state."""
        self._history: list[Tensor] = []
        """What LBFGS keeps while it makes its first step."""

    def __iter__(self) -> Iterator[Optimizer]:
        return iter([each for each in (one() for one in self._made) if each is not None])

    @property
    def made(self) -> int:
        """How many the script has made."""
        return len(self._made)

    @property
    def steps(self) -> int:
        """Steps of all of them."""
        return self.stepped.total()

    @property
    def steps_since_made(self) -> int:
        """Steps of all of them since the last one was made."""
        return self.steps - self._made_at

    @property
    def has_single_steps(self) -> bool:
        """Whether one of them has stepped once."""
        return any(self.stepped[self.key(each)] == 1 for each in self)

    @property
    def largest_waits(self) -> bool:
        """Whether one has not stepped that has more parameters than each of those that have."""
        most = {True: 0, False: 0}
        for each in self:
            has_stepped = self.stepped[self.key(each)] > 0
            most[has_stepped] = max(most[has_stepped], len(parameters_of(each)))
        return most[False] > most[True]

    @property
    def made_after(self) -> dict[tuple[int, ...], int]:
        """Storages that hold the state of one → the event after which it was made."""
        return {each: self._made_events.get(key, 0) for key, each in self._states.items()}

    def add(self, optimizer: Optimizer) -> None:
        """The script makes an optimizer."""
        self._made.append(weakref.ref(optimizer))
        self._made_at = self.steps

    def is_made(self, optimizer: Optimizer) -> None:
        """An optimizer has its parameters."""
        self._made_events.setdefault(self.key(optimizer), self._recorder.now())

    def key(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer: that of one in whose place it was made, unless both are
        there."""
        key = _key(optimizer)
        earlier = takewhile(lambda each: each is not optimizer, self)
        # A key looks at all parameters; few optimizers begin with the same one.
        alike = (each for each in earlier if _first(each) is _first(optimizer))
        return key + sum(_key(each) == key for each in alike)

    def freeze(self) -> None:
        """Keep which parameters do not train now beside others that their optimizer trains; where it
        trains none, optimizers take turns, as in a GAN."""
        for held in map(parameters_of, self):
            if any(each.requires_grad for each in held):
                self._frozen |= {id(each) for each in held if not each.requires_grad}

    def begin_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if isinstance(optimizer, LBFGS):
            self._history += history_of_first_step(optimizer)
            self._recorder.classify(self._history, "optimizer_state", "")

    def fill(self, optimizer: Optimizer) -> str:
        """Fill what an optimizer keeps of many steps after one; return what was assumed."""
        if not isinstance(optimizer, LBFGS):
            return ""
        self._history.clear()
        fill_history(optimizer)
        return "LBFGS: its history is counted in full, with as many updates as history_size allows"

    def end_step(self, optimizer: Optimizer, step: int, *, has_trained: bool) -> None:
        """An optimizer has stepped.

        Args:
            optimizer: the optimizer.
            step: the step of the script.
            has_trained: whether it has trained anything.
        """
        key = self.key(optimizer)
        self.steppers[step].add(key)
        self.stepped[key] += has_trained
        if self.stepped[key] <= STEPS or len(optimizer.state) > self._trained[key]:
            self._trained[key] = len(optimizer.state)  # more, where parts of a network take turns
            self.learn_state(optimizer)

    def learn_state(self, optimizer: Optimizer) -> None:
        """Learn which storages hold the state of an optimizer, which may be gone at the end."""
        numbers = self._recorder.numbers_of(
            each
            for parameter, values in optimizer.state.items()
            if id(parameter) not in self._frozen
            for each in tensors_in(values)
        )
        held = self._recorder.numbers_of(parameters_of(optimizer))  # as SAM puts back
        self._states[self.key(optimizer)] = tuple({*numbers}.difference(held))

    def left(self, steps: int) -> tuple[int, list[str]]:
        """Return the gradients and state of those that have not stepped as often as is traced, in
        bytes, and a sentence on each of them.

        Args:
            steps: that were traced.
        """
        left, frozen = 0, 0
        sentences = []
        for optimizer in self:
            held = [
                each
                for each in parameters_of(optimizer)
                if self._was_on_gpu(each) and (each.is_floating_point() or each.is_complex())
            ]  # others, such as those in 4 bits, have no gradient
            trained = [each for each in held if each.requires_grad or each in optimizer.state]
            known = set(map(id, trained))  # some scripts turn requires_grad off between steps
            frozen += self._bytes_of(optimizer, [each for each in held if id(each) not in known])
            stepped = self.stepped[self.key(optimizer)]
            wraps_another = any(
                self.stepped[self.key(each)] > stepped
                and {*map(id, optimizer.param_groups)} <= {*map(id, each.param_groups)}
                for each in self
            )
            if trained and stepped < STEPS and not wraps_another:
                more = self._bytes_of(optimizer, trained)
                left += more
                sentences.append(
                    f"{type(optimizer).__name__} {'stepped once' if stepped else 'never stepped'} in the {steps:,} steps "
                    f"that were traced: the safe bytes hold its gradients and state ({more / MIB:,.0f} MiB)"
                )
        if frozen >= MIB:
            sentences.append(
                f"an optimizer holds parameters that do not train (requires_grad is off): if they are unfrozen later, "
                f"their gradients and state take {frozen / MIB:,.0f} MiB more, and what their layers keep for them"
            )
        return left, sentences

    def _bytes_of(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
        """Return the bytes of gradients and state of ``parameters`` once the optimizer has
        stepped."""
        kind: Any = type(optimizer)
        settings = {
            name: value
            for name, value in optimizer.defaults.items()
            if name not in _KERNELS and name in signature(kind).parameters
        }
        with patch.object(self, "is_counting", True), unseen():
            dense = (each for each in parameters if each.layout is torch.strided)
            alone = [nn.Parameter(torch.empty_like(each, device="meta")) for each in dense]
            for parameter in alone:
                parameter.grad = torch.empty_like(parameter)
            gradients = sum(each.nbytes for each in alone)
            try:
                twin = kind(alone, **settings)
                twin.step()
            except Exception:  # an optimizer of the user's own
                return gradients
        held = [each for state in twin.state.values() for each in state.values()]
        tensors = [each for each in held if isinstance(each, Tensor) and each.numel() > 1]
        return gradients + sum(each.nbytes for each in tensors)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def counted(steps: int) -> str:
    """Return a number of optimizer steps in words."""
    return "1 optimizer step" if steps == 1 else f"{steps:,} optimizer steps"


def _key(optimizer: Optimizer) -> int:
    """A number of an optimizer, and of any that is made in its place for the same parameters."""
    return hash((type(optimizer), *map(id, parameters_of(optimizer))))


def _first(optimizer: Optimizer) -> Any:
    """The first parameter of an optimizer."""
    return next((each for group in optimizer.param_groups for each in group["params"]), None)
