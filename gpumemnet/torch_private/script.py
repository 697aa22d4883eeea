"""Names that are replaced while a training script runs: what it sees of CUDA, and how modules get to a GPU.

Most of these names are public; they are listed here because the trace puts functions of its own in their place.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Final

import torch

from gpumemnet.torch_private.names import SCRIPT, TorchName, declare, has_parameters

TORCH_FOLDER: Final = str(Path(torch.__file__).parent)
LAYERS_FOLDER: Final = str(Path(torch.nn.modules.__file__).parent)
LBFGS_FILE: Final = inspect.getfile(torch.optim.LBFGS)
WRAPPER_FILES: Final = frozenset({f"{TORCH_FOLDER}/overrides.py", f"{TORCH_FOLDER}/utils/_device.py"})
"""Files of PyTorch that stand between a caller and a function mode; the last is ``with torch.device(…)``."""

_declare = partial(declare, use=SCRIPT)

CUDA_CONSTANTS: Final = (
    *("is_available", "is_initialized", "device_count", "current_device", "get_device_name", "get_device_capability"),
    "is_current_stream_capturing",
)
"""Functions of ``torch.cuda`` that answer the same throughout a trace."""
CUDA_WITHOUT_EFFECT: Final = (
    *("synchronize", "set_device", "init", "manual_seed", "manual_seed_all", "ipc_collect", "reset_peak_memory_stats"),
    "reset_max_memory_allocated",
)
CUDA_AMOUNTS: Final = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
CUDA_STREAMS: Final = ("Stream", "Event", "stream", "set_stream", "current_stream", "default_stream")
CUDA_MEMORY: Final = ("get_device_properties", "mem_get_info", "empty_cache")

CUDA: Final[dict[str, TorchName]] = {
    name: _declare(f"torch.cuda:{name}", "answer for the simulated GPU")
    for name in (*CUDA_CONSTANTS, *CUDA_WITHOUT_EFFECT, *CUDA_AMOUNTS, *CUDA_STREAMS, *CUDA_MEMORY)
}
"""Functions of ``torch.cuda`` by their name."""

CURRENT_STREAM: Final = _declare("torch.accelerator:current_stream", "give optimizers the streams of the simulated GPU")
DATA_PARALLEL: Final = _declare("torch.nn:DataParallel.__init__", "refuse DataParallel")
RECORD_STREAM: Final = _declare("torch:Tensor.record_stream", "accept streams of the simulated GPU")
MODULE_TO: Final = _declare("torch.nn:Module.to", "move modules to the simulated GPU")
MODULE_TO_EMPTY: Final = _declare(
    "torch.nn:Module.to_empty",
    "allocate modules on the simulated GPU",
    probe=has_parameters("torch.nn:Module.to_empty", "self", "device"),
)
MODULE_CUDA: Final = _declare("torch.nn:Module.cuda", "move modules to the simulated GPU")
COMPILE: Final = _declare("torch:compile", "trace what is not compiled")
SAVE: Final = _declare("torch:save", "write no file of weights without values")
SET_DEFAULT_DEVICE: Final = _declare("torch:set_default_device", "keep a script from choosing a device for everything")
ALLOCATOR_SETTINGS: Final = _declare("torch._C:_accelerator_setAllocatorSettings", "know the settings that a script chooses")
MEMORY_FRACTION: Final = _declare("torch.cuda:set_per_process_memory_fraction", "know the share of the GPU that a script chooses")
BACKWARD: Final = _declare("torch.autograd:backward", "know when a backward pass begins")

_declare("torch.__future__:set_overwrite_module_params_on_conversion", "give parameters a new identity in Module.to_empty")
_declare("torch.utils:swap_tensors", "put a meta tensor in place of a tensor that others refer to")
