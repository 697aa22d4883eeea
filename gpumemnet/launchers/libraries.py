"""What libraries that train on several GPUs find on the simulated one: ``DataParallel``, checkpoints
of several ranks, ``FullyShardedDataParallel``, accelerate and torchrun's own code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from gpumemnet.extract.module_calls import map_tensors, tensors_in
from gpumemnet.launchers import names
from gpumemnet.launchers.parallel import Streams

_FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"


def replacements(note: Callable[[str], None]) -> list[tuple[str, object]]:
    """Return names of ``DataParallel`` with what takes their place.

    Args:
        note: called with a note, if there are several GPUs.
    """
    return [
        (names.DATA_PARALLEL, _data_parallel_forward(note)),
        (names.NAMED_GPUS, _count_named_gpus),
    ]


def cuda_replacements(streams: Streams) -> list[tuple[str, object]]:
    """Return names of what ``torch.nn.parallel`` calls on GPUs with what takes their place: the first
    GPU keeps what it has.

    Args:
        streams: those of the simulated GPU.
    """
    return [
        (names.BROADCAST, lambda tensors, devices, _: [list(tensors) for _ in devices]),
        (names.BROADCAST_ONE, lambda tensor, devices: [tensor.cuda()] * len(devices)),
        (
            names.SCATTER,
            lambda tensor, devices, *rest: [
                share if number else share.cuda()
                for number, share in enumerate(tensor.chunk(len(devices), rest[1]))
            ],
        ),
        (names.GATHER, lambda tensors, dimension, _: torch.cat(list(tensors), dimension)),
        (names.SCATTER_STREAM, streams.current_stream),
    ]


def preparations(
    saves: Callable[[], None], note: Callable[[str], None]
) -> dict[str, Callable[[Any], None]]:
    """Return what prepares modules for several ranks as they are imported, by name.

    Args:
        saves: called where the script saves.
        note: called with a note on what is left out.
    """

    def gather_here(module: Any) -> None:
        # PyTorch's own moves shards to the device of their mesh, which is the host here.
        module._gather_state_dict = gather

    def checkpoint_nothing(module: Any) -> None:
        def skipped(*args: object, **kwargs: object) -> Future[None]:
            saves()
            note("torch.distributed.checkpoint reads and writes nothing")
            done: Future[None] = Future()
            done.set_result(None)
            return done

        for name in {"save", "async_save", "load"} & vars(module).keys():
            setattr(module, name, skipped)

    def gather(state: Any, *, cpu_offload: bool = False, **options: Any) -> Any:
        def whole(tensor: Tensor) -> Tensor:
            gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            return gathered.cpu() if cpu_offload else gathered

        saves()
        return map_tensors(state, whole)

    return {
        names.STATE_DICTS: gather_here,
        **dict.fromkeys(names.CHECKPOINTS, checkpoint_nothing),
        _FSDP1: _noting_unlimited_gathers(note),
        "accelerate.utils.fsdp_utils": _shard_in_place,
        "torch.distributed.run": _start_torchrun,
    }


def _count_named_gpus(numbers: Sequence[int]) -> None:
    """Replace a check of ``DataParallel``: the GPUs that it names are there where code counts them."""
    if len(numbers) > 1:
        count = max(torch.cuda.device_count(), *(each + 1 for each in numbers))
        vars(torch.cuda)["device_count"] = partial(int, count)  # which can be pickled


def _data_parallel_forward(note: Callable[[str], None]) -> Callable[..., Any]:
    """Return what replaces ``DataParallel.forward``: it runs the first GPU's share, and gathers an
    output of the whole batch.  What is left out is the sum of the other GPUs' gradients, which passes
    through it in buckets.

    Args:
        note: called with a note, if there are several GPUs.
    """

    def forward(parallel: nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
        ranks, dimension = len(parallel.device_ids) or 1, parallel.dim
        shares, named = parallel.scatter(inputs, kwargs, parallel.device_ids or [0])
        if len(shares) == 1:
            return parallel.module(*shares[0], **named[0])
        note(
            f"DataParallel: the first of {ranks} GPUs; the sum of the gradients may take as much as they do for a moment"
        )
        tensors = zip(tensors_in((inputs, kwargs)), tensors_in((shares[0], named[0])), strict=False)
        sizes = ([each.shape[dimension] for each in pair] for pair in tensors if pair[0].ndim)
        samples, of_share = next(sizes, (len(shares), 1))

        module, kind = parallel.module, type(parallel)
        if "replicate" in vars(parallel) or kind.replicate is not nn.DataParallel.replicate:
            module = parallel.replicate(module, parallel.device_ids[:1])[0]  # it may switch layers

        def gathered(tensor: Tensor) -> Tensor:
            share, along = (tensor, dimension) if tensor.ndim else (tensor[None], 0)
            per_sample, rest = divmod(share.shape[along], of_share)  # else of each GPU, as a loss
            gather: Any = Gathered.apply
            whole: Tensor = gather(
                share, len(shares) * share.shape[along] if rest else samples * per_sample, along
            )
            return whole

        return map_tensors(module(*shares[0], **named[0]), gathered)

    return forward


class Gathered(torch.autograd.Function):
    """The outputs of all GPUs in one tensor; its gradient is the first GPU's share."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, length: int, dimension: int) -> Tensor:
        """Allocate the gathered tensor beside the share."""
        ctx.dimension, ctx.length = dimension, share.shape[dimension]
        shape = list(share.shape)
        shape[dimension] = length
        return share.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the share's gradient."""
        return gradients[0].narrow(ctx.dimension, 0, ctx.length), None, None


def _noting_unlimited_gathers(note: Callable[[str], None]) -> Callable[[Any], None]:
    """Return what prepares the module of ``FullyShardedDataParallel``: it calls ``note`` where gathers
    are not limited.

    A gathered unit is recorded on the stream that computes with it, so that its block is free once
    the GPU is done (``record_stream``).  The rate limiter lets the host wait for that; without it the
    host runs ahead, as far as the GPU is slow.
    """

    def prepare(module: Any) -> None:
        init = module.FullyShardedDataParallel.__init__

        @wraps(init)
        def made(self: object, *args: Any, **kwargs: Any) -> None:
            if not kwargs.get("limit_all_gathers", True):
                note(
                    "limit_all_gathers=False: blocks of gathered units are free once the GPU is done with them, "
                    "and the host runs ahead: up to all parameters, gathered, can be reserved more"
                )
            init(self, *args, **kwargs)

        module.FullyShardedDataParallel.__init__ = made

    return prepare


def _start_torchrun(module: Any) -> None:
    """Let a program that starts processes by torchrun's own code start ``torchrun``."""
    module.run = _run_torchrun


def _run_torchrun(args: Any) -> NoReturn:
    options = [f"--nnodes={args.nnodes}", f"--nproc-per-node={args.nproc_per_node}"]
    options += ["--module"] if args.module else []
    script = [args.training_script, *args.training_script_args]
    sys.exit(subprocess.call(["torchrun", *options, *script]))


def _shard_in_place(module: Any) -> None:
    """Let accelerate shard the weights of rank 0 block by block.

    Otherwise it shards an empty copy and broadcasts each weight into it, whose peak on the GPU is
    the shards and the largest weight.
    """
    prepare: Any = getattr(module, "fsdp2_prepare_model", None)  # older versions have none

    def prepare_in_place(accelerator: Any, model: Any) -> Any:
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        return prepare(accelerator, model)

    module.fsdp2_prepare_model = prepare_in_place
