"""The memory at the moment of most memory, where ``cudnn.benchmark`` makes it larger than the
steady state.

In the first step cuDNN tries every algorithm of every convolution, each with its workspace, and
PyTorch gives the workspaces back.  The widest search is that of the convolution with the largest
input and output.  Little else than the weights is on the GPU
beside it: such a convolution is one of the first, so few tensors are kept yet, and in the backward
    pass most have been freed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gpumemnet.features.vector import FEATURE_NAMES
from gpumemnet.job.job_table import Array

SEARCH_COPIES: Final = 3.5
"""What a search holds, in bytes of the input and output of its convolution: both once, their
gradients or copies in another layout, and a workspace of 1.5 times them.  Fitted to traced jobs
with ``cudnn.benchmark`` it is 3.3 to 3.5 in each of five folds over architecture families
(docs/evaluation/real_networks.md)."""
_BENCHMARK, _CONVOLUTION, _WEIGHTS = (
    FEATURE_NAMES.index(name)
    for name in ("is_cudnn_benchmark", "largest_convolution_bytes", "weight_bytes")
)


def startup_peaks(
    expected_bytes: Array, features: Array, context_bytes: int, available_bytes: int
) -> Array:
    """Returns the start-up peak of ``B`` jobs, shape ``[B]``; the steady state where no search
    exceeds it.

    A search takes no more than is free, so it does not exceed the memory of the GPU.

    Args:
        expected_bytes: the steady state, shape ``[B]``.
        features: shape ``[B, F]``.  Jobs without layers do not say how large their convolutions
            are.
        context_bytes: the CUDA context in ``expected_bytes``.
        available_bytes: memory that a job can use on the GPU.
    """
    is_searched = features[:, _BENCHMARK]
    if not is_searched.any():
        return expected_bytes
    searches = is_searched * features[:, _CONVOLUTION]
    peaks = context_bytes + features[:, _WEIGHTS] + SEARCH_COPIES * searches
    highest: Array = np.maximum(
        expected_bytes, np.where(searches > 0, np.minimum(peaks, available_bytes), 0.0)
    )
    return highest
