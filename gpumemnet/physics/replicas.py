"""Memory of training on several GPUs: what ``DistributedDataParallel`` adds to a process that trains
one of several replicas, and what NCCL holds outside of PyTorch's allocator.

Beside the memory of a single process, each replica holds every gradient a second time, in the
buckets that are summed (Li et al., arXiv 2006.15704, section 4.2;
``torch/csrc/distributed/c10d/reducer.cpp``), and NCCL's buffers.  ``gradient_as_bucket_view=True``
would save the second copy; it is not PyTorch's default, and a job does not state it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpumemnet.job.job_table import Array
from gpumemnet.units import MIB

PAIR_BYTES: Final = 544 * MIB
GROUP_BYTES: Final = 688 * MIB
"""Measured for a process group of two GPUs, and of three or four, after its first all-reduce, on
A100s with NVLink (github.com/NVIDIA/nccl/issues/964)."""
BOUND_BYTES: Final = 1024 * MIB
"""Of each group.  Assumed: faster links take more channels, and memory is proportional to these
(github.com/NVIDIA/nccl/issues/986)."""
NCCL_SOURCE: Final = "NCCL: read on A100s with NVLink (github.com/NVIDIA/nccl/issues/964)"


def communicator_bytes(groups: Sequence[int]) -> int:
    """Bytes that NCCL is expected to hold for process groups of so many ranks; 0 for groups of one
    rank."""
    return sum(PAIR_BYTES if ranks == 2 else GROUP_BYTES for ranks in groups if ranks > 1)


def communicator_bound_bytes(groups: Sequence[int]) -> int:
    """Upper bound of the bytes that NCCL holds for them."""
    return BOUND_BYTES * sum(ranks > 1 for ranks in groups)


WITH_OTHERS: Final = (
    "one of several replicas: what the others make it hold is no part of what a model learns"
)
"""Reason for which models do not learn from such a job: NCCL's share depends on the site and is not
measured separately."""


def added_by_replicas(ranks: Array, bucket_bytes: Array) -> tuple[Array, Array]:
    """Memory that replicas add to ``B`` jobs, expected and at most, shape ``[B]`` each; 0 for jobs with
    one rank.

    Args:
        ranks: of the jobs, shape ``[B]``.
        bucket_bytes: their gradients; 0 where a trace has counted the buckets, shape ``[B]``.
    """
    buckets = np.where(ranks > 1, bucket_bytes, 0.0)
    counts, which = np.unique(ranks.astype(np.int64), return_inverse=True)
    expected, bound = (
        np.array([share((count,)) for count in counts.tolist()], dtype=np.float64)[which]
        for share in (communicator_bytes, communicator_bound_bytes)
    )
    return buckets + expected, buckets + bound
