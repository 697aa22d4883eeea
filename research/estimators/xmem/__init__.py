"""xMem (Shi et al., Middleware 2025, arXiv 2510.21048): a run on the CPU, its blocks replayed on
the GPU's allocators.

Three training iterations really run on the CPU under ``torch.profiler``.  Allocations and frees
become blocks; a block belongs to the part of the program that ran when it was allocated.  Blocks
that do not outlive the layer, or the backward operator, that made
them are dropped: they are temporaries of CPU kernels.  What is left is replayed on the simulated
    allocator.

Where the paper leaves something open:

* Layers are marked by hooks.  The profiler's Python stacks would make the run several times as
  long.
* Outside of leaf layers a block must outlive its operator.
* Of the optimizer's blocks those count whose size is that of a parameter.
* The device below the caching allocator has no fragmentation of its own.
* The context is that of the GPU's profile, not a reading of the run that is predicted.
"""

from .estimator import XMEM

__all__ = ["XMEM"]
