"""What libraries beside PyTorch see of the simulated GPU, from when a script imports them.

NVML answers for the simulated card.  What its functions return that are not named here is unknown,
and they raise ``NVMLError_NotSupported``, as on cards without the feature.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn

from gpumemnet.gpu import DeviceProfile

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
    note: Callable[[str], None],
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

    return {
        "pynvml": lambda module: _answer_nvml(module, device, memory, count),
        "torch.utils.tensorboard.writer": without_graph,
        "tensorboardX.writer": without_graph,
        "accelerate.utils.fsdp_utils": _shard_in_place,
    }


def _shard_in_place(module: Any) -> None:
    """Let accelerate shard the weights of rank 0 block by block.

    Otherwise it shards an empty copy and broadcasts each weight into it, whose peak on the GPU is
    the shards and the largest weight.
    """
    prepare = module.fsdp2_prepare_model

    def prepare_in_place(accelerator: Any, model: Any) -> Any:
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        return prepare(accelerator, model)

    module.fsdp2_prepare_model = prepare_in_place


_HANDLES: Final = ("Index", "UUID", "PciBusId", "Serial")


def _answer_nvml(
    nvml: Any, device: DeviceProfile, memory: Callable[[], tuple[int, int]], count: int
) -> None:
    def bytes_of(handle: object, version: object = None) -> SimpleNamespace:
        used, total = memory()
        return SimpleNamespace(total=total, used=used, free=total - used)

    def not_supported(name: str) -> NoReturn:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    def processes(handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=memory()[0])]

    answers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("nvmlInit", "nvmlInitWithFlags", "nvmlShutdown"), lambda *flags: None),
        "nvmlDeviceGetCount": lambda: count,
        **{f"nvmlDeviceGetHandleBy{key}": lambda value: value for key in _HANDLES},
        "nvmlDeviceGetMemoryInfo": bytes_of,
        "nvmlDeviceGetName": lambda handle: device.name,
        "nvmlDeviceGetIndex": lambda handle: 0,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: device.compute_capability,
        "nvmlSystemGetDriverVersion": lambda: "0.0",
    }
    vars(nvml).update(answers, _nvmlGetFunctionPointer=not_supported)
