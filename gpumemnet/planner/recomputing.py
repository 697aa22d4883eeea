"""Runs a unit so that its forward pass runs again in the backward pass: ``torch.utils.checkpoint``
without re-entering autograd.

The statistics of normalization layers must be updated once.  While a forward pass is repeated, such
layers update copies.  With :data:`~gpumemnet.planner.plans.Decision.RECOMPUTE_CHEAP` the results of
expensive operators are kept (selective activation checkpointing, Korthikanti et al., arXiv
2205.05198).

What would train differently is refused: by :func:`check_plan` before a step, by :func:`verify` in the
first forward pass, in which a unit runs forward and backward once as it is and once recomputed, and
by :class:`StateCheck` in every further one; the first one may fill caches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gpumemnet.errors import PlanError, did_you_mean
from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.planner.plans import EXPENSIVE_OPERATORS, Decision
from gpumemnet.torch_private.names import (
    Arguments,
    Function,
    Keywords,
    forward_hooks,
    is_compiled,
    operator_name,
    own_buffers,
    schema,
    tree_map_only,
    version_of,
    without_function_modes,
)

_selective_contexts: Any = create_selective_checkpoint_contexts  # without types

NORMALIZATIONS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers whose running statistics change in the forward pass."""


def recompute(
    module: nn.Module,
    forward: Function,
    args: Arguments,
    kwargs: Keywords,
    *,
    cheap: bool,
) -> Any:
    """Return ``forward(*args, **kwargs)``, which runs again in the backward pass.

    Args:
        module: the unit.
        forward: its forward pass.
        args, kwargs: its arguments.
        cheap: whether the results of :data:`~gpumemnet.planner.plans.EXPENSIVE_OPERATORS` are
            kept.
    """
    names = tuple(kwargs)

    def run(*values: Any) -> Any:
        at = len(values) - len(names)
        return forward(*values[:at], **dict(zip(names, values[at:], strict=True)))

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = _selective_contexts(_policy) if cheap else (nullcontext(), nullcontext())
        return first, _Repetition(module, again)

    # A checkpoint saves positional arguments as autograd saves tensors, so that they can be
    # swapped; it keeps the others.
    return checkpoint(
        run,
        *args,
        *kwargs.values(),
        use_reentrant=False,
        context_fn=contexts,
    )


class _Repetition:
    """Context in which normalization layers update copies of their statistics; it may be entered
    again.

    Args:
        module: the unit.
        inner: a context that is entered last, if any.
    """

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any] | None = None) -> None:
        self._norms = [each for each in module.modules() if isinstance(each, NORMALIZATIONS)]
        self._inner = inner or nullcontext()
        self._originals: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        for module in self._norms:
            buffers = own_buffers(module)
            self._originals.append((buffers, {**buffers}))
            buffers.update(
                {name: each.clone() for name, each in buffers.items() if each is not None}
            )
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            while self._originals:
                buffers, before = self._originals.pop()
                buffers.update(before)


def _policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if keeps_results(operator, args, kwargs)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def keeps_results(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the results of a call are kept when cheap operators are recomputed.

    They are those of expensive operators that draw no random numbers: a repetition must draw all
    numbers again.
    """
    if operator_name(operator) not in EXPENSIVE_OPERATORS:
        return False
    at = _dropout_argument(operator)
    return not kwargs.get("dropout_p", args[at] if at is not None and at < len(args) else 0.0)


@cache
def _dropout_argument(operator: Any) -> int | None:
    names = [argument.name for argument in schema(operator).arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


_CHECKPOINTING: Final = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes that are true where Hugging Face's and timm's models recompute by themselves."""
_WRAPPERS: Final = ("CheckpointWrapper", "OffloadWrapper")
"""Classes of ``torch.distributed.algorithms._checkpoint`` around a module that is recomputed or
offloaded."""
_STATELESS_HOOKS: Final = ("WeightNorm",)
"""Classes of hooks of PyTorch that may run twice: they compute a weight from others."""


def check_plan(model: nn.Module, decisions: Mapping[str, Decision]) -> dict[nn.Module, str]:
    """Return the module of each name in ``decisions``.

    Raises:
        PlanError: the plan does not belong to the model, or the model would compute something else
            under it.
    """
    every = dict(model.named_modules(remove_duplicate=False))
    _check_model(every)
    units: dict[nn.Module, str] = {}
    for name, decision in decisions.items():
        if name not in every:
            raise PlanError(
                f"the model has no module '{name}'; {did_you_mean(name, every, 'make a new plan for this model')}"
            )
        first = units.setdefault(every[name], name)
        if decisions[first] != decision:
            raise PlanError(
                f"'{first}' and '{name}' are one module, which cannot both {decisions[first]} and {decision}: "
                "give both names the same decision"
            )
    for module, name in units.items():
        if decisions[name] != Decision.KEEP:
            _check_unit(module, name, decisions)
    return units


def _check_model(modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        shown = f"module '{name}'" if name else "the model"
        if is_compiled(module):
            raise PlanError(
                f"{shown} is compiled, and compiled code ignores a plan: apply the plan to the model without torch.compile, "
                "or set torch._functorch.config.activation_memory_budget instead"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"{shown} is TorchScript, whose forward pass cannot be replaced: plan the model before torch.jit"
            )
        if isinstance(module, nn.DataParallel):
            raise PlanError(
                f"{shown} is torch.nn.DataParallel, whose replicas cannot follow a plan: use DistributedDataParallel"
            )
        if (
            any(getattr(module, flag, False) is True for flag in _CHECKPOINTING)
            or type(module).__name__ in _WRAPPERS
        ):
            raise PlanError(
                f"{shown} is checkpointed already, so that it would be recomputed twice: switch that off "
                "(such as model.gradient_checkpointing_disable()), and let the plan do it"
            )


def _check_unit(module: nn.Module, name: str, decisions: Mapping[str, Decision]) -> None:
    for inner, part in module.named_modules():
        path = ".".join(filter(None, (name, inner)))
        if inner and decisions.get(path, Decision.KEEP) != Decision.KEEP:
            raise PlanError(
                f"'{path}' is inside of '{name}', which has the decision {decisions[name]} as a whole, so that its own "
                "decision would be ignored: remove one of the two from the plan"
            )
        if not decisions[name].recomputes:
            continue
        parametrizations = getattr(part, "parametrizations", None)
        is_stateful = isinstance(parametrizations, nn.ModuleDict) and any(
            True for _ in parametrizations.buffers()
        )
        hooks = {type(hook).__name__: hook for hook in (forward_hooks(part) if inner else ())}
        if is_stateful or "SpectralNorm" in hooks:
            raise PlanError(
                f"'{path}' has a parametrization with a state, which a recomputation of '{name}' would advance twice, with "
                "other gradients: keep or swap this module instead"
            )
        for kind, hook in hooks.items():
            if kind not in _STATELESS_HOOKS:
                raise PlanError(
                    f"'{path}' has the forward hook {getattr(hook, '__qualname__', kind)}, which would run twice in each step "
                    f"if '{name}' is recomputed: remove the hook, or keep or swap this module"
                )


_OF_CACHE: Final = ("update", "get_seq_length")
"""Methods of the caches of keys and values of Hugging Face's models, which they fill in training,
too."""
_TOLERANCE: Final = 1e-3
"""Share of the largest gradient by which two backward passes may differ: kernels that add up in
another order in each run do."""
_TOLERANCE_16_BITS: Final = 2e-2


class StateCheck:
    """Compares the state of a unit before and after a forward pass that will be repeated.

    Args:
        module: the unit.
        name: its name.
        arguments: what its forward pass is called with: positional and named arguments.
        is_first: whether it is the first forward pass, which may fill caches.

    Raises:
        PlanError: an argument would be changed a second time.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        arguments: tuple[tuple[object, ...], Mapping[str, object]],
        is_first: bool,
    ) -> None:
        self._module = module
        self._name = name
        _check_arguments(name, arguments)
        self._inputs = [(tensor, version_of(tensor)) for tensor in tensors_in(arguments)]
        self._before = None if is_first else _state(module)

    def check(self) -> None:
        """Raise an error if the forward pass changed the state.

        Raises:
            PlanError: names what was changed.
        """
        for tensor, before in self._inputs:
            if version_of(tensor) != before:
                raise PlanError(
                    f"'{self._name}' changes its input of shape {list(tensor.shape)} in place, so that its recomputation would "
                    "begin with other values: use the variant that is not in place, or keep or swap this module"
                )
        if self._before is None:
            return
        after = _state(self._module)
        keys = dict.fromkeys((*self._before, *after))
        changed = [key for key in keys if after.get(key) != self._before.get(key)]
        if changed:
            raise PlanError(
                f"'{self._name}' changes its own state in the forward pass ({', '.join(changed[:3])}), which its recomputation "
                "would change once more: keep or swap this module instead"
            )


def _check_arguments(name: str, arguments: tuple[tuple[object, ...], Mapping[str, object]]) -> None:
    positional, named = arguments
    for value in (*positional, *named.values()):
        if all(callable(getattr(value, method, None)) for method in _OF_CACHE):
            raise PlanError(
                f"'{name}' adds keys and values to a {type(value).__name__}, and its recomputation would add them once more: set "
                "model.config.use_cache = False for training, or keep or swap this module"
            )


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what a forward pass could change: buffers but those of normalizations, and the random
    numbers of Python and NumPy."""
    state: dict[str, Any] = {"random numbers of Python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["random numbers of NumPy"] = (kind, keys.tobytes(), *rest)
    for name, part in module.named_modules():
        if not isinstance(part, NORMALIZATIONS):
            for key, buffer in own_buffers(part).items():
                path = f"{name}.{key}" if name else key
                state[path] = id(buffer), None if buffer is None else version_of(buffer)
    return state


def has_values(module: nn.Module, arguments: object) -> bool:
    """Whether a forward pass computes values: in a trace it does not."""
    with without_function_modes():  # they hide that the GPU of a traced script is simulated
        return not any(each.is_meta for each in (*module.parameters(), *tensors_in(arguments)))


def verify(
    module: nn.Module,
    name: str,
    plain: Function,
    planned: Function,
    args: Arguments,
    kwargs: Keywords,
) -> None:
    """Check that a unit gives the same result and the same gradients as it is and recomputed.

    Both passes begin with the same random numbers, and their gradients are dropped; they take as
    much memory as the unit's recomputation.

    Args:
        module: the unit.
        name: its name.
        plain, planned: its forward pass as it is and with its decision.
        args, kwargs: what it is called with.

    Raises:
        PlanError: names the unit and what differs, or the state that changes.
    """
    _check_model({name: module})  # a trainer may have switched checkpointing on since
    tensors = [*module.parameters(), *tensors_in((args, kwargs))]
    is_short = torch.is_autocast_enabled(tensors[0].device.type if tensors else "cpu") or any(
        tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize
        for tensor in tensors
    )
    tolerance = _TOLERANCE_16_BITS if is_short else _TOLERANCE
    expected = _results(module, plain, args, kwargs)
    for what, found in _results(module, planned, args, kwargs).items():
        most = float(expected[what].abs().max()) if expected[what].numel() else 0.0
        if not torch.allclose(found, expected[what], 0.0, tolerance * most, equal_nan=True):
            raise PlanError(
                f"'{name}' computes something else when it runs again ({what} differs), so that it would train differently: "
                "keep or swap this module instead, or apply the plan with verify=False if its forward pass is not "
                "meant to be the same twice"
            )


def _results(
    module: nn.Module,
    forward: Function,
    args: Arguments,
    kwargs: Keywords,
) -> dict[str, Tensor]:
    """Return the outputs and the gradients of one forward and backward pass by their names, the
    module's state unchanged."""
    sources: list[Tensor] = []

    def own(tensor: Tensor) -> Tensor:
        source = tensor.detach().requires_grad_(tensor.requires_grad)
        if not tensor.requires_grad:
            return source.clone()
        sources.append(source)
        return source.clone()  # an operator may change it in place

    own_args, own_kwargs = tree_map_only(Tensor, own, (args, kwargs))
    devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.is_cuda}
    with torch.random.fork_rng(devices):
        torch.clear_autocast_cache()  # recomputation begins without casts of weights, too
        with _Repetition(module):
            outputs = [
                each for each in tensors_in(forward(*own_args, **own_kwargs)) if each.requires_grad
            ]
        parameters = {
            f"the gradient of {key}": each
            for key, each in module.named_parameters()
            if each.requires_grad
        }
        inputs = {f"the gradient of input {n}": each for n, each in enumerate(sources)}
        by_name = {**parameters, **inputs}
        results = {f"output {n}": each.detach() for n, each in enumerate(outputs)}
        if outputs and by_name:
            weights = [
                torch.arange(each.numel(), device=each.device).cos().view(each.shape).to(each)
                for each in outputs
            ]
            gradients = torch.autograd.grad(
                outputs, [*by_name.values()], weights, allow_unused=True
            )
            results |= {
                key: each for key, each in zip(by_name, gradients, strict=True) if each is not None
            }
    torch.clear_autocast_cache()
    return results
