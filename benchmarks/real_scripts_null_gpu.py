"""Runs a script on the null GPU and writes the allocator's peaks; started by ``real_scripts.py``.

``PYTHON real_scripts_null_gpu.py PEAKS.json SCRIPT [ARGUMENTS]``, with the variables of
``tests/dataset_builder/measure/null_gpu/build.py``.  PyTorch's own CUDA code allocates; no kernel
runs, so values are arbitrary.  The peaks are those until the script ends, by an error too, or
``NULL_GPU_SECONDS`` (8) after its fourth backward pass.  Process groups talk to nobody: NCCL asks
for a driver.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch

PASSES = 4
SECONDS = int(os.environ.get("NULL_GPU_SECONDS", "8"))
PEAKS = ("requested", "allocated", "reserved")


def _begin_alone(*_: Any, world_size: int = -1, rank: int = -1, **__: Any) -> None:
    """Begin a process group whose other ranks do nothing."""
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed_c10d.init_process_group(
        "fake",
        rank=rank if rank >= 0 else int(os.environ.get("RANK", "0")),
        world_size=world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1")),
        store=FakeStore(),
    )


def main() -> None:
    out, script = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    sys.argv = sys.argv[2:]
    sys.path[0] = str(script.parent)
    torch.compile = lambda model=None, *_, **__: (
        (lambda function: function) if model is None else model
    )  # as in the trace
    torch.distributions.Distribution.set_default_validate_args(
        False
    )  # nothing has the values that they check
    passes = 0
    backward = torch.autograd.backward

    def end(*_: Any) -> None:
        statistics = torch.cuda.memory_stats()
        out.write_text(
            json.dumps({peak: int(statistics[f"{peak}_bytes.all.peak"]) for peak in PEAKS})
        )
        os._exit(0)

    def passed(*args: Any, **kwargs: Any) -> None:
        nonlocal passes
        backward(*args, **kwargs)
        passes += 1
        if passes == PASSES:
            signal.signal(signal.SIGALRM, end)
            signal.alarm(SECONDS)

    vars(torch.autograd)["backward"] = passed
    vars(torch.distributed)["init_process_group"] = _begin_alone
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        if passes >= PASSES:
            end()


if __name__ == "__main__":
    main()
