"""DeepSpeed's engine on the simulated GPU: its own Python code runs, ZeRO stages 1 to 3 and offloading
included.

What is compiled when DeepSpeed is first used is left out: kernels that update parameters in place,
pin memory or read files (``deepspeed/ops/op_builder``).  None of them allocates memory on the GPU, and
the states of its optimizers are made in Python (``ops/adam/fused_adam.py``, ``ops/adam/cpu_adam.py``).
Checks for overflow find none, and norms of offloaded gradients are 1.

An engine steps its own optimizer once for each group of parameters (``sub_group_size``), and once
when it is made.  Only ``DeepSpeedEngine._take_model_step`` ends a step of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from gpumemnet.errors import ExtractError
from gpumemnet.extract.module_calls import tensors_in

_IN_PLACE: Final = frozenset(
    {
        *("fused_adam", "fused_lamb", "fused_lion", "cpu_adam", "cpu_adagrad", "cpu_lion"),
        *("utils", "pin_memory", "deepspeed_shm_comm"),
    }
)
"""Compiled operators that allocate nothing on the GPU."""
_ZERO: Final = "deepspeed.runtime.zero"
_GRADIENTS: Final = ("averaged_gradients", "grad_partitions_flat_buffer")


class Recording(Protocol):
    """What records the memory of a script, see :class:`gpumemnet.tracing.script.observer.ScriptObserver`."""

    @property
    def recorder(self) -> Any:
        """Records storages."""

    def engine_runs(self) -> AbstractContextManager[object]:
        """Context in which no step of the script ends."""

    def engine_steps(self, optimizer: Any, step: Callable[[], None]) -> None:
        """An engine steps."""


def preparations(
    observer: Recording, without_values: Callable[[str], None]
) -> Mapping[str, Callable[[Any], None]]:
    """Return what prepares DeepSpeed's modules as they are imported, by name.

    Args:
        observer: observes the script.
        without_values: called with a folder whose code needs no values of large tensors on the
            host: partitions that are offloaded.
    """
    communicating = observer.recorder.communicating()

    def operators(module: Any) -> None:
        without_values(str(Path(module.__file__).parents[2]))
        module.OpBuilder.load = lambda builder, verbose=False: _compiled(builder.name)

    def cards(module: Any) -> None:
        module.CUDA_Accelerator._get_nvml_gpu_id = lambda accelerator, number: number

    def names(module: Any) -> None:
        # parameters that are referred to weakly cannot become meta tensors
        module.WeakIdNameMap.__setitem__ = lambda known, thing, name: known._names.update(
            {id(thing): name}
        )

    def checks(module: Any) -> None:
        module.is_invalid_grad_norm = lambda norm: False
        module.CheckOverflow.has_overflow = _finds_none

    def replicated(module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer
        states_within_engine(optimizer)
        optimizer.has_overflow = _finds_none
        optimizer.complete_grad_norm_calculation_for_cpu_offload = lambda made, parameters: 1.0
        optimizer.setup_buckets = communicating(optimizer.setup_buckets)

    def partitioned(module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer_Stage3
        states_within_engine(optimizer)
        optimizer.has_overflow = _finds_none
        optimizer.complete_grad_norm_calculation_for_cpu_offload = lambda made, parameters: (
            torch.ones(())
        )
        set_up = optimizer._setup_for_real_optimizer

        def classified(made: Any) -> None:
            set_up(made)
            partitions = [parameter.ds_tensor for group in made.fp16_groups for parameter in group]
            observer.recorder.classify(partitions, "parameter", "")

        optimizer._setup_for_real_optimizer = classified

    def gathering(module: Any) -> None:
        coordinator = module.PartitionedParameterCoordinator
        coordinator.fetch_sub_module = communicating(coordinator.fetch_sub_module)

    def states_within_engine(optimizer: Any) -> None:
        run = optimizer.initialize_optimizer_states

        @wraps(run)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with observer.engine_runs():
                return run(*args, **kwargs)

        optimizer.initialize_optimizer_states = inside

    def engine(module: Any) -> None:
        step = module.DeepSpeedEngine._take_model_step

        @wraps(step)
        def observed(made: Any, *args: Any, **kwargs: Any) -> None:
            observer.recorder.classify(_gradients(made.optimizer), "gradient", "")
            observer.recorder.classify(_buckets(made.optimizer), "communication", "")
            observer.engine_steps(
                made.basic_optimizer or made.optimizer, lambda: step(made, *args, **kwargs)
            )

        module.DeepSpeedEngine._take_model_step = observed

    return {
        "deepspeed.ops.op_builder.builder": operators,
        "deepspeed.accelerator.cuda_accelerator": cards,
        "deepspeed.utils.debug": names,
        "deepspeed.runtime.utils": checks,
        "deepspeed.runtime.engine": engine,
        f"{_ZERO}.stage_1_and_2": replicated,
        f"{_ZERO}.stage3": partitioned,
        f"{_ZERO}.partitioned_param_coordinator": gathering,
    }


def _finds_none(*args: object, **kwargs: object) -> bool:
    return False


class _Compiled:
    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("zenflow"):
            raise ExtractError("ZenFlow's optimizer is a process of compiled code: not traced")
        return lambda *args, **kwargs: None


def _compiled(name: str) -> Any:
    """Return what stands in for a compiled operator of DeepSpeed.

    Raises:
        ExtractError: the operator allocates memory that is not known.
    """
    if name not in _IN_PLACE:
        raise ExtractError(
            f"DeepSpeed's compiled operator {name!r} cannot be traced: it allocates memory of its own"
        )
    return _Compiled()


def _gradients(optimizer: Any) -> Iterator[Tensor]:
    """Yield the partitions of the gradients that a ZeRO optimizer keeps."""
    for name in _GRADIENTS:
        yield from tensors_in(getattr(optimizer, name, None))


def _buckets(optimizer: Any) -> Iterator[Tensor]:
    """Yield the buckets in which a ZeRO optimizer reduces gradients."""
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from tensors_in(bucket.buffer)
