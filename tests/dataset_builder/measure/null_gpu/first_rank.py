"""Runs a training script on the null GPU as the first of several ranks, and prints the peaks of
PyTorch's allocator.

``python first_rank.py RANKS SCRIPT [ARGUMENTS]`` with the variables of ``build.environment``.
There are no other ranks: collectives are PyTorch's fake ones, or gloo's with itself where DDP wants
their results.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import device_mesh
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

PEAKS = ("requested", "allocated", "reserved")
_begin = dist.init_process_group


def begin(ranks: int, replicates: bool) -> None:
    """Make this process the first of ``ranks``; DDP wants results of its collectives."""
    if replicates:
        _begin("gloo", rank=0, world_size=1, store=HashStore())
        vars(distributed)["_verify_param_shape_across_processes"] = lambda *args: (
            None
        )  # it compares what nobody has computed
    else:
        _begin("fake", rank=0, world_size=ranks, store=FakeStore())


def peaks() -> list[int]:
    """Requested, allocated and reserved bytes at their peaks."""
    statistics = torch.cuda.memory_stats()
    return [statistics[f"{peak}_bytes.all.peak"] for peak in PEAKS]


def main() -> None:
    ranks, script = int(sys.argv[1]), sys.argv[2]
    replicates = "DistributedDataParallel" in Path(script).read_text()

    def init_process_group(*args: object, **kwargs: object) -> None:
        begin(ranks, replicates)

    def get_world_size(group: dist.ProcessGroup | None = None) -> int:
        return ranks if replicates or group is None else group.size()

    def spawn(function: Callable[..., object], args: tuple[object, ...], nprocs: int) -> None:
        function(0, *args)

    vars(device_mesh)["init_process_group"] = init_process_group
    vars(dist).update(
        init_process_group=init_process_group,
        destroy_process_group=lambda: None,
        get_world_size=get_world_size,
    )
    vars(torch.multiprocessing)["spawn"] = spawn
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")
    print("PEAKS" + json.dumps(peaks()), flush=True)
    os._exit(0)  # threads of the process group may outlive it


if __name__ == "__main__":
    main()
