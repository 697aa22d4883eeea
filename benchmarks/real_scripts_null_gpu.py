"""Runs a script on the null GPU and writes the allocator's peaks; started by ``real_scripts.py``.

``PYTHON real_scripts_null_gpu.py PEAKS.json SCRIPT [ARGUMENTS]``, with the variables of
``tests/dataset_builder/measure/null_gpu/build.py``.  PyTorch's own CUDA code allocates; no kernel
runs, so values are arbitrary.  The peaks are those until the script ends, by an error too, or
``NULL_GPU_SECONDS`` (8) after its fourth backward pass.
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


def main() -> None:
    out, script = (Path(each).resolve() for each in sys.argv[1:3])
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
        told = torch.cuda.memory_stats()
        out.write_text(json.dumps({peak: told[f"{peak}_bytes.all.peak"] for peak in PEAKS}))
        os._exit(0)

    def passed(*args: Any, **kwargs: Any) -> None:
        nonlocal passes
        backward(*args, **kwargs)
        passes += 1
        if passes == PASSES:
            signal.signal(signal.SIGALRM, end)
            signal.alarm(SECONDS)

    vars(torch.autograd)["backward"] = passed
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        if passes >= PASSES:
            end()


if __name__ == "__main__":
    main()
