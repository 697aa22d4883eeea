"""The two closed formulas that GPUMemNet compares itself with (arXiv 2602.17817, section 2):
exactly as published, without corrections.

Both know fp32 only, and neither has an optimizer, an allocator or a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.training_job import TrainingJob

FP32_BYTES: Final = 4


def naive(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """Bytes of parameters and of one input in fp32, shape ``[B]``.

    Source: blog "Estimating GPU Memory Consumption of Deep Learning Models": parameters × 4 B +
        input size × 4 B.  It names no
    batch, so the input is that of one sample.
    """
    return np.array(
        [FP32_BYTES * (_parameters(job) + job.input_elements) for job in jobs], dtype=np.float64
    )


def horus(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """4 B × (batch × activations + parameters + batch × gradients), with as many gradients as
    parameters; shape ``[B]``.

    Source: Horus (Yeung et al., IEEE TPDS 33, 2022).  Gradients do not grow with the batch, yet the
        formula multiplies them by
    it.  The 800 or 1,000 MB that some variants add for CUDA are left out.
    """
    return np.array(
        [
            FP32_BYTES
            * (
                job.batch_size * _activations(job)
                + _parameters(job)
                + job.batch_size * _parameters(job)
            )
            for job in jobs
        ],
        dtype=np.float64,
    )


def _parameters(job: TrainingJob) -> int:
    assert job.total_parameters is not None
    return job.total_parameters


def _activations(job: TrainingJob) -> int:
    assert job.total_activations is not None
    return job.total_activations
