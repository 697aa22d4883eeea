"""What libraries beside PyTorch see of the simulated GPU, from when a script imports them.

NVML answers for the simulated card.  What its functions measure that are not named here
is 0.

State of paged optimizers of bitsandbytes is in CUDA's managed memory, which the driver moves
between GPU and host.  The trace counts it as on the GPU, where it is while there is room.
bitsandbytes takes it from its CUDA library, which is not loaded here (``get_paged`` and ``fill`` in
``bitsandbytes/functional.py``).
"""

from __future__ import annotations

import ast
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import signature
from linecache import getlines
from operator import le
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpumemnet.errors import ExtractError
from gpumemnet.gpu import DeviceProfile
from gpumemnet.launchers.programs import DRIVER
from gpumemnet.torch_private.names import Function
from gpumemnet.tracing.script.branches import is_guarded

COMPILED: Final = (
    "a compiled extension that needs a GPU can be a module of this name for the trace, "
    "whose functions return tensors of the right shape, or nothing where they write into theirs"
)
"""What to do about one, in an error."""

_Note = Callable[[str], None]
"""Called with a note on what is left out."""
Prepare = Callable[[Any], None]
"""Called with a module that was just imported."""


class _Preparing(MetaPathFinder):
    """Finds the modules that are to be prepared.

    Args:
        prepare: by the name of the module.
    """

    def __init__(self, prepare: Mapping[str, Prepare]) -> None:
        self._prepare = prepare

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, which prepares it once it has run; ``None`` for others."""
        if name.partition(".")[0] == _FLASH and _FLASH in self._prepare:
            is_missing = PathFinder.find_spec(_FLASH) is None and _needs_import(sys._getframe(1))
            loader = _FlashAttention(self._prepare[_FLASH])
            return ModuleSpec(name, loader, is_package=True) if is_missing else None
        if name not in self._prepare:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def run(module: ModuleType) -> None:
                execute(module)
                self._prepare[name](module)

            found.loader.exec_module = run  # type: ignore[method-assign]
        return found


@contextmanager
def prepared(prepare: Mapping[str, Prepare]) -> Iterator[None]:
    """Context in which modules are prepared as they are imported, or now if they are already."""
    for name in prepare.keys() & sys.modules.keys():
        prepare[name](sys.modules[name])
    finder = _Preparing(prepare)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def preparations(
    device: DeviceProfile,
    memory: Callable[[], tuple[int, int]],
    count: int,
    note: _Note,
) -> dict[str, Prepare]:
    """Return what prepares libraries for ``count`` simulated GPUs.

    Args:
        device: the kind of GPU.
        memory: returns the used and the total bytes of one.
        count: number of GPUs.
        note: called with a note on what is left out.
    """

    def without_graph(module: Any) -> None:
        module.SummaryWriter.add_graph = lambda *args, **kwargs: note("add_graph was left out")

    def export(model: Any, args: Any = (), *others: object, **options: object) -> Any:
        note("torch.onnx.export was left out, but for a pass of its model")
        with torch.no_grad():
            model(*(args if isinstance(args, tuple) else (args,)))
        return SimpleNamespace(save=lambda *args, **kwargs: None)

    return {
        "pynvml": lambda module: _answer_nvml(module, device, memory, count),
        "torch.utils.tensorboard.writer": without_graph,
        "tensorboardX.writer": without_graph,
        "torch.onnx": _with(export=export),
        "torch.distributions.von_mises": _with(  # it rejects until all values are accepted
            _rejection_sample=lambda loc, concentration, ratio, start: loc + start
        ),
        "torch.utils.cpp_extension": lambda module: _build_what_can_be(module, note),
        _FLASH: lambda module: note(_STANDS_IN),
        "huggingface_hub.hf_api": lambda module: _push_nothing(module, note),
        "bitsandbytes.cuda_specs": _with(get_cuda_specs=lambda: None),  # its library of CUDA
        "mmengine.runner.loops": _with(  # it pauses for two seconds before each epoch
            time=SimpleNamespace(sleep=bool)
        ),
        "transformers.trainer": lambda module: _accumulate_once(module, note),
        **dict.fromkeys(_LIGHTNING, _validate_last),
        **{name.replace("training_epoch", "prediction"): _number_all for name in _LIGHTNING},
        **dict.fromkeys(_OLD_LIGHTNING, _validate_old_last),
        "transformers.modeling_utils": lambda module: _take_flash(module, note),
        "transformers.modeling_flash_attention_utils": _flash_package,
        "transformers.integrations.hub_kernels": lambda module: _flash_kernels(module, note),
        "kernels": lambda module: _flash_kernels(module, note),
        "torch.nn.attention.flex_attention": lambda module: _take_flex(module, note),
        "torchvision.extension": _with(_assert_has_ops=int),
    }


def _with(**values: object) -> Prepare:
    """Return what puts values into a module."""
    return lambda module: module.__dict__.update(values)


_PUSHES: Final = (
    *("create_repo", "create_branch", "create_commit", "delete_repo"),
    *("upload_file", "upload_folder", "upload_large_folder"),
)


def _push_nothing(module: Any, note: _Note) -> None:
    """Keep from the hub what a script would write there: weights without values."""

    def left_out(repo_id: str = "", *args: object, **options: object) -> Any:
        note("nothing was pushed to the hub")
        return SimpleNamespace(repo_id=repo_id, done=lambda: True, result=lambda: None)

    for name in _PUSHES:
        setattr(module, name, left_out)
        setattr(module.HfApi, name, lambda api, *args, **options: left_out(*args, **options))


_FLASH: Final = "flash_attn"
"""A package that can be built for a GPU alone, and that some scripts import."""


def _needs_import(frame: FrameType | None) -> bool:
    """Whether the code that imports a module here goes no other way where it is missing."""
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return False
    tree, line = ast.parse("".join(getlines(frame.f_code.co_filename))), frame.f_lineno
    around = [
        type(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return bool({ast.Import, ast.ImportFrom} & {*around}) and ast.Try not in around


class _FlashAttention(Loader):
    """Loads what stands in for the package.

    Args:
        prepare: called with it.
    """

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def exec_module(self, module: Any) -> None:
        """Let a module have what scripts name: two functions work, others say that they are missing."""

        def named(name: str) -> Function:
            if name.startswith("__"):
                raise AttributeError(name)
            return _KERNELS.get(name) or partial(_is_missing, name)

        vars(module).update(__version__="2.8.3", __getattr__=named)
        self._prepare(module)


def _is_missing(name: str, *args: object, **options: object) -> NoReturn:
    raise ExtractError(f"{name} of the package {_FLASH} cannot be traced where it is not installed")


_STANDS_IN: Final = "PyTorch's own flash attention stands in for that of a package or of the hub"


def _take_kernels(module: Any) -> None:
    module.is_kernels_available = lambda: True


def _flash_kernels(module: Any, note: _Note) -> None:
    """Let PyTorch's flash attention stand in for that of other packages: it allocates what they do,
    for sequences of different lengths in one row too."""
    _take_kernels(module)
    get_kernel: Any = getattr(module, "get_kernel", None)

    def get(name: str, *args: Any, **options: Any) -> Any:
        if "flash-attn" not in name:
            return get_kernel(name, *args, **options)
        note(_STANDS_IN)
        kernels = SimpleNamespace(**_KERNELS)
        kernels.flash_attn_interface = kernels  # of version 3
        return kernels

    module.get_kernel = get


def _take_flex(module: Any, note: _Note) -> None:
    """Let flex attention allocate what its compiled kernel does: attention that is not compiled
    holds all scores."""

    def flex_attention(
        query: Any, key: Any, value: Any, *options: Any, return_lse: bool = False, **named: Any
    ) -> Any:
        note("PyTorch's own flash attention stands in for flex attention's compiled kernel")
        out, sums = _flash(query, key, value, scale=named.get("scale"))[:2]
        if named.get("return_aux") is not None:
            return out, module.AuxOutput(lse=sums, max_scores=None)
        return (out, sums) if return_lse else out

    module.flex_attention = flex_attention


def _take_flash(module: Any, note: _Note) -> None:
    _take_kernels(module)

    def is_available() -> bool:
        note(_STANDS_IN)
        return True

    if hasattr(module.PreTrainedModel, "_check_and_enable_flash_attn_2"):  # it asks for the package
        module.is_flash_attn_2_available = is_available


def _flash_package(module: Any) -> None:
    for name, function in _KERNELS.items():
        for each in (name, name.replace(_FLASH, "flash_attn_2")):
            vars(module)[each] = vars(module).get(each) or function


def _flash(*inputs: Any, causal: bool = False, scale: float | None = None) -> Any:

    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(*inputs, 0.0, causal, scale=scale)


def _attend_in_row(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return _attend(query[None], key[None], value[None], **options)[0]


def _attend(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: object,
) -> Any:
    heads = [each.transpose(1, 2) for each in (query, key, value)]
    return _flash(*heads, causal=causal, scale=softmax_scale)[0].transpose(1, 2)


_KERNELS: Final = {"flash_attn_func": _attend, "flash_attn_varlen_func": _attend_in_row}


def _accumulate_once(module: Any, note: _Note) -> None:
    """Let passes whose gradients a Trainer adds up take no time where their batch is no larger than
    that of an earlier pass of the step, which found gradients, too: they take no more memory."""
    if not hasattr(module.Trainer, "create_accelerator_and_postprocess"):
        return  # an older one
    run: Function = module.Trainer.training_step
    passes: list[tuple[dict[str, Any], Any]] = []

    def step(trainer: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        is_counted = trainer.is_deepspeed_enabled or not isinstance(inputs, Mapping)
        given = {} if is_counted else inputs
        shapes = {name: tuple(getattr(each, "shape", ())) for name, each in given.items()}
        if shapes and not trainer.accelerator.sync_gradients:
            for earlier, loss in passes[1:]:
                if earlier.keys() == shapes.keys() and all(
                    len(earlier[name]) == len(shape) and all(map(le, shape, earlier[name]))
                    for name, shape in shapes.items()
                ):
                    note(
                        "passes whose gradients are added up were left out where their batch is no larger than "
                        "that of an earlier pass of the step"
                    )
                    return loss
        loss = run(trainer, model, inputs, *args, **options)
        passes.append((shapes, loss))
        if trainer.accelerator.sync_gradients:
            passes.clear()
        return loss

    module.Trainer.training_step = step
    fetch = getattr(module.Trainer, "get_batch_samples", None)
    first: list[Any] = []

    def filled(*args: Any, **options: Any) -> Any:
        # The loader of a later training gives few batches: they make two steps of its optimizer.
        batches, items = fetch(*args, **options)  # type: ignore[misc]
        most = options.get("num_batches") or args[2]
        is_short = 0 < len(batches) < most
        batches += [] if batches else first
        first[:] = batches[:1] if is_short else []
        batches += [copy(batches[0]) for _ in range(len(batches), most) if batches]
        return batches, items

    if fetch is not None:
        module.Trainer.get_batch_samples = filled


_LIGHTNING: Final = tuple(
    f"{name}.loops.training_epoch_loop" for name in ("lightning.pytorch", "pytorch_lightning")
)


_OLD_LIGHTNING: Final = (
    "pytorch_lightning.loops.epoch.training_epoch_loop",
    "pytorch_lightning.trainer.training_loop",
)
"""Of versions 1.4 to 1.9, and before."""


def _validate_old_last(module: Any) -> None:
    """Let older versions of Lightning validate where the loader of an epoch ends: as after the last
    batch of a loader whose length is not known."""
    kind: Any = getattr(module, "TrainingEpochLoop", None) or getattr(module, "TrainLoop", None)
    names = ("_should_check_val_fx", "should_check_val_fx")
    name = next((name for name in names if hasattr(kind, name)), None)
    if name is None:  # another version
        return
    due: Callable[..., bool] = getattr(kind, name)

    def is_due(loop: Any, *args: Any, **options: Any) -> bool:
        is_last = args[1] if args else loop.batch_progress.is_last_batch
        length = math.inf if is_last else loop.trainer.val_check_batch
        with patch.object(loop.trainer, "val_check_batch", length):
            return due(loop, *args, **options)

    setattr(kind, name, is_due)
    if hasattr(kind, "advance"):  # some of these versions do not know which batch is the last
        _validate_last(module)


def _number_all(module: Any) -> None:
    """Let Lightning's writers of predictions have numbers of samples for batches that are copies of
    an earlier one: its sampler did not give these."""
    kind: Any = getattr(module, "_PredictionLoop", None)
    numbers: Any = getattr(kind, _NUMBERS, None)  # older versions have none

    def padded(loop: Any, *loaders: Any) -> Any:
        seen = numbers(loop, *loaders)
        return seen and seen + seen[-1:] * 1000

    if numbers is not None:
        setattr(kind, _NUMBERS, padded)


_NUMBERS: Final = "_get_batch_indices"
_ACCUMULATED: Final = "_accumulated_batches_reached"
"""Whether a step is due, as Lightning asks."""


def _validate_last(module: Any) -> None:
    """Let Lightning validate where the loader of an epoch ends, which may be before the batch that
    it counts to; epochs give two batches from then on, whose gradients make a step."""
    kind: Any = getattr(module, "_TrainingEpochLoop", None) or module.TrainingEpochLoop
    count = kind.on_advance_end.__code__.co_argcount - 1  # 0 in versions before 2.2
    run: Function = kind.advance
    most = [math.inf]

    def accumulated(loop: Any) -> bool:
        batches = min(loop.trainer.accumulate_grad_batches, *most)
        return bool(loop.batch_progress.current.ready % batches == 0)

    setattr(kind, _ACCUMULATED, accumulated)

    def advance(loop: Any, *args: Any) -> Any:
        try:
            return run(loop, *args)
        except StopIteration:
            trainer, index = loop.trainer, loop.batch_idx
            if index + 1 < trainer.num_training_batches < math.inf:
                most[:] = [2]
            if trainer.check_val_every_n_epoch is None:
                index = loop.total_batch_idx
            if loop.batch_idx >= 0 and index + 1 < trainer.val_check_batch < math.inf:
                with patch.object(trainer, "val_check_batch", index + 1):
                    loop.on_advance_end(*args[:count])
            raise

    kind.advance = advance


_HANDLES: Final = ("Index", "UUID", "PciBusId", "Serial")


def _build_what_can_be(module: Any, note: _Note) -> None:
    """Let code go on that builds an extension of CUDA code as it is imported: it may not call it."""

    def built(build: Function, name: str, *args: Any, **named: Any) -> Any:
        given = signature(build).bind_partial(name, *args, **named).arguments
        if not given.get("cuda_sources") and ".cu" not in str(given.get("sources")):
            return build(name, *args, **named)
        if is_guarded(sys._getframe(1), RuntimeError):
            raise RuntimeError("extensions of CUDA code are not built for a trace")
        note(f"the extension {name} was not built, because it is of CUDA code")
        return _Unbuilt(name)

    for name in ("load", "load_inline"):
        setattr(module, name, partial(built, getattr(module, name)))


class _Unbuilt(ModuleType):
    """An extension that could not be built."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):  # Python asks modules for such names
            raise AttributeError(name)

        def run(*args: object, **kwargs: object) -> NoReturn:
            raise ExtractError(f"{self.__name__}.{name} is compiled for a GPU; {COMPILED}")

        return run


def _answer_nvml(
    nvml: Any, device: DeviceProfile, memory: Callable[[], tuple[int, int]], count: int
) -> None:
    def bytes_of(handle: object, version: object = None) -> SimpleNamespace:
        used, total = memory()
        return SimpleNamespace(total=total, used=used, free=total - used)

    def processes(handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=memory()[0])]

    answers: dict[str, Function] = {
        "nvmlInitWithFlags": lambda flags: None,
        "nvmlDeviceGetCount": lambda: count,
        **{f"nvmlDeviceGetHandleBy{key}": lambda value: value for key in _HANDLES},
        "nvmlDeviceGetMemoryInfo": bytes_of,
        "nvmlDeviceGetName": lambda handle: device.name,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: device.compute_capability,
        "nvmlSystemGetDriverVersion": lambda: DRIVER,
    }
    vars(nvml).update(answers, _nvmlGetFunctionPointer=lambda name: lambda *arguments: 0)


def take_from_gpu(optimizer: Optimizer, note: Callable[[str], object]) -> None:
    """Let a paged optimizer allocate its state on the simulated GPU; does nothing for others.

    Args:
        optimizer: about to take a step.
        note: called with a note for a paged optimizer.
    """
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if functional is None or not getattr(optimizer, "is_paged", False):
        return

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device or "cuda")

    def fill(tensor: Tensor, value: Any, device: Any = None, prefetch: bool = True) -> None:
        tensor.fill_(value)

    functional.get_paged, functional.fill = get_paged, fill
    note(
        "paged optimizer: its state is counted as on the GPU; the driver moves parts of it to the host where memory is short"
    )
