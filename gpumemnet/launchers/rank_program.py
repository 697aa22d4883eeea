"""What each process of a training on several GPUs holds and runs.

A traced model is replicated or sharded by PyTorch.  For a model by its name, accelerate or DeepSpeed
splits it as their users' configurations say, and some steps follow, in a trace of a script, as its
first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from gpumemnet.extract.module_calls import MetaTensors
from gpumemnet.torch_private.names import is_batch_norm, part_on_rank

if TYPE_CHECKING:
    from gpumemnet.launchers.parallel import RankRecorder, Streams

BUCKET_ELEMENTS: Final = 200_000_000
"""Elements of a bucket of DeepSpeed's stages 1 and 2, as in the configurations of trainers."""
_STEPS: Final = 4
_LAST_STAGE: Final = 3
_WRAPPERS: Final = ("module", "_fsdp_wrapped_module")


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank trains.

    Attributes:
        model: the module to call.
        parameters: the rank's own parameter for each of the model's, by the ``id`` of the latter.
        owners: path of the module that owns a parameter or a buffer, by the ``id`` of the rank's
            own.
        notes: one sentence on how the GPUs are used.
    """

    model: nn.Module
    parameters: dict[int, nn.Parameter]
    owners: dict[int, str]
    notes: tuple[str, ...] = ()


@contextmanager
def on_rank(
    model: nn.Module,
    meta_tensors: MetaTensors,
    recorder: RankRecorder,
    streams: Streams,
    parallel: str,
    ranks: int,
    dtype: torch.dtype | None,
) -> Iterator[Rank]:
    """Context in which ``model`` is on the GPU of one rank; enter it inside the recorder's context.

    Args:
        model: the model, with meta tensors in place.
        meta_tensors: its meta tensors.
        recorder: records what arrives on the GPU.
        streams: those of the GPU.
        parallel: ``none``, ``ddp``, ``fsdp`` or ``fsdp_zero2``.
        ranks: number of ranks.
        dtype: as :func:`gathered_in` says.

    Raises:
        ExtractError: this process is part of a process group, or the model cannot be sharded.
    """
    owners = {id(tensor): path for tensor, path, _ in meta_tensors.moves}

    def arrived(tensor: Tensor, is_parameter: bool) -> None:
        recorder.arrived(
            tensor, "parameter" if is_parameter else "buffer", owners.get(id(tensor), "")
        )

    if parallel in ("none", "ddp"):
        for tensor, _, is_parameter in meta_tensors.moves:
            arrived(tensor, is_parameter)
    if parallel == "none":
        yield Rank(model, meta_tensors.parameters, owners)
        return
    from torch.nn.parallel import DistributedDataParallel

    from gpumemnet.launchers.parallel import (
        process_group,
        replicas_on_meta,
        sharded,
        sharding_on_meta,
    )

    recorder.set_ranks(ranks)
    with ExitStack() as stack:
        gathered = stack.enter_context(process_group(ranks, recorder.exchanged))
        if parallel == "ddp":
            note = f"each of {ranks:,} GPUs holds all of the model (DistributedDataParallel with its defaults) and its own batch"
            stack.enter_context(replicas_on_meta(recorder))
            yield Rank(DistributedDataParallel(model), meta_tensors.parameters, owners, (note,))
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        of_model = {key: names[id(parameter)] for key, parameter in meta_tensors.parameters.items()}
        stack.enter_context(sharding_on_meta(recorder, streams, arrived, gathered))
        groups = stack.enter_context(sharded(model, ranks, dtype, parallel == "fsdp"))
        shards = dict(model.named_parameters())
        for name, shard in shards.items():
            owners[id(shard)] = name.rpartition(".")[0]
            recorder.classify((part_on_rank(shard),), "parameter", owners[id(shard)])
        summed = ""
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            summed = f", gathered in {name}, gradients summed in float32"
        yield Rank(
            model,
            {key: shards[name] for key, name in of_model.items()},
            owners,
            (
                f"the first of {ranks:,} ranks, which holds the largest shards: fully_shard in {groups:,} groups{summed}",
            ),
        )


def gathered_in(
    model: nn.Module, parallel: str, autocast: torch.dtype | None
) -> torch.dtype | None:
    """Return the type in which sharded parameters are gathered and used; ``None`` for their own
    type.

    ``fully_shard`` replaces autocast, except in models with batch norms: those keep fp32 statistics
    and accept no other weights.

    Args:
        model: the model.
        parallel: ``none``, ``ddp``, ``fsdp`` or ``fsdp_zero2``.
        autocast: the type that autocast would compute in; ``None`` without autocast.
    """
    normalizes = any(is_batch_norm(module) for module in model.modules())
    return autocast if parallel.startswith("fsdp") and not normalizes else None


class Splitting(Protocol):
    """How the ranks train a model together.

    Attributes:
        parallel: ``ddp``, ``fsdp1``, ``fsdp2``, or a stage of DeepSpeed: ``zero1`` to ``zero3``.
        precision: names ``fp16`` for that type; else half types are bfloat16.
        is_half: whether weights are in a half type.
        is_autocast: whether accelerate's mixed precision is on.
        batch_size: samples of a forward pass.
        has_adapters: whether the model has adapters of ``peft``, which are units of their own.
        checkpointing: whether blocks are recomputed.
        is_reentrant: whether they are by ``transformers`` before 4.53, whose models called a
            re-entrant checkpoint with a wrapped block: its gathering is recomputed, too.
    """

    @property
    def parallel(self) -> str: ...  # noqa: D102

    @property
    def precision(self) -> str: ...  # noqa: D102

    @property
    def is_half(self) -> bool: ...  # noqa: D102

    @property
    def is_autocast(self) -> bool: ...  # noqa: D102

    @property
    def batch_size(self) -> int: ...  # noqa: D102

    @property
    def has_adapters(self) -> bool: ...  # noqa: D102

    @property
    def checkpointing(self) -> bool: ...  # noqa: D102

    @property
    def is_reentrant(self) -> bool: ...  # noqa: D102


def train_on_rank(
    module: Any,
    inputs: Mapping[str, Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    how: Splitting,
    accumulation: int,
) -> None:
    """Train for some steps.

    Args:
        module: a loss around its ``model``, on meta; called with ``inputs``, it returns the loss
            under that name.
        inputs: as large as those of one GPU.
        optimizer: makes the optimizer.
        how: how the ranks share the model.
        accumulation: forward passes of a step of the optimizer.
    """
    module.to_empty(device="cpu")  # the weights are there, as if they had been loaded
    module.train()
    begin = _with_deepspeed if how.parallel.startswith("zero") else _with_accelerate
    step = begin(module, optimizer, how, accumulation)
    for _ in range(_STEPS * accumulation):
        step(
            {
                name: torch.zeros(each.shape, dtype=each.dtype, device="cuda")
                for name, each in inputs.items()
            }
        )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


_Step = Callable[[dict[str, Tensor]], None]


def _with_accelerate(
    model: Any,
    new_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    how: Splitting,
    accumulation: int,
) -> _Step:
    from accelerate import Accelerator

    half = "fp16" if "fp16" in how.precision else "bf16"
    accelerator = Accelerator(
        fsdp_plugin=_plugin(model, how),
        mixed_precision=half if how.is_autocast else "no",
        gradient_accumulation_steps=accumulation,
    )
    if how.parallel == "fsdp1":  # its flat parameters replace those of the model
        model = accelerator.prepare(model)
        if how.is_reentrant and how.checkpointing:
            _recompute_units(model)
        optimizer = accelerator.prepare(new_optimizer(_trained(model)))
    else:
        model, optimizer = accelerator.prepare(model, new_optimizer(_trained(model)))

    def step(batch: dict[str, Tensor]) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()

    return step


def _plugin(module: Any, how: Splitting) -> Any:
    """FSDP as accelerate's questions configure it, and as Trainer changes that for adapters."""
    if how.parallel == "ddp":
        return None
    from accelerate import FullyShardedDataParallelPlugin

    blocks = getattr(module.model, "_no_split_modules", None) or ()
    units = {type(each).__name__ for each in module.modules()} & set(blocks)
    is_first = how.parallel == "fsdp1"
    first: dict[str, Any] = {"use_orig_params": True, "backward_prefetch": "BACKWARD_PRE"}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1 if is_first else 2,
        auto_wrap_policy="transformer_based_wrap" if units else "no_wrap",
        transformer_cls_names_to_wrap=sorted(units),
        **(first if is_first else {}),
    )
    if is_first and how.has_adapters:
        from peft.utils.other import fsdp_auto_wrap_policy

        plugin.auto_wrap_policy = fsdp_auto_wrap_policy(module.model)
    return plugin


def _recompute_units(model: nn.Module) -> None:
    """Let checkpoints be around wrapped blocks instead of within them."""
    for unit in model.modules():
        block: Any = getattr(unit, "_fsdp_wrapped_module", None)
        if getattr(block, "gradient_checkpointing", False) and len(list(block.children())) > 1:
            block.gradient_checkpointing = False
            unit.forward = partial(_recomputed, unit.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=True)


def _with_deepspeed(
    model: Any,
    new_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    how: Splitting,
    accumulation: int,
) -> _Step:
    import deepspeed

    is_fp16 = "fp16" in how.precision
    stage = int(how.parallel.removeprefix("zero"))
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    width = getattr(getattr(model.model, "config", None), "hidden_size", None)
    if stage < _LAST_STAGE:
        zero["reduce_bucket_size"] = BUCKET_ELEMENTS
    elif width:  # what "auto" stands for in configurations of transformers
        zero["reduce_bucket_size"] = width * width
        zero["stage3_prefetch_bucket_size"] = int(0.9 * width * width)
        zero["stage3_param_persistence_threshold"] = 10 * width
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=new_optimizer(_trained(model)),
        config={
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": how.batch_size,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": how.is_half and not is_fp16},
            "fp16": {"enabled": is_fp16},
        },
    )

    def step(batch: dict[str, Tensor]) -> None:
        engine.backward(engine(**batch)["loss"])
        engine.step()

    return step


def unwrapped(path: str, ranks: int) -> str:
    """The path of a module within the model, from its path in a trace of one of several ranks:
    without its outermost class and wrappers."""
    names = path.split(".")[1:]
    kept = (name for name in names if name not in _WRAPPERS)
    return path if ranks == 1 else ".".join(kept)
