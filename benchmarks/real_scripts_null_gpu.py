"""Runs a script on the null GPU for four steps and writes the allocator's peaks; started by
``real_scripts.py``.

``PYTHON real_scripts_null_gpu.py PEAKS.json SCRIPT [ARGUMENTS]``, with the variables of
``tests/dataset_builder/measure/null_gpu/build.py``.  PyTorch's own CUDA code allocates; no kernel
runs, so values are arbitrary.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 4
PEAKS = ("requested", "allocated", "reserved")


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
    first: list[Optimizer] = []
    steps = 0

    def end() -> None:
        statistics = torch.cuda.memory_stats()
        out.write_text(
            json.dumps({peak: int(statistics[f"{peak}_bytes.all.peak"]) for peak in PEAKS})
        )
        os._exit(0)

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal steps
        first.extend([optimizer] if not first else [])
        steps += optimizer is first[0]
        if steps == STEPS:
            end()

    passes = 0
    backward = torch.autograd.backward

    def passed(*args: Any, **kwargs: Any) -> None:
        nonlocal passes
        if (
            passes == STEPS and not made
        ):  # no optimizer: a step ends where the next backward pass begins
            end()
        passes += 1
        backward(*args, **kwargs)

    made: list[int] = []
    make = Optimizer.__init__

    def noticed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        make(optimizer, *args, **kwargs)

    vars(torch.autograd)["backward"] = passed
    type.__setattr__(Optimizer, "__init__", noticed)
    register_optimizer_step_post_hook(stepped)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
