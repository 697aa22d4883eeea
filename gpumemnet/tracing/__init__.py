"""Predicts a job's GPU memory byte by byte, without a GPU.

A training step runs on meta tensors; the differences between meta tensors and CUDA are corrected.
Every allocation and release is recorded, and the record is replayed through a simulation of
PyTorch's caching allocator.

:func:`~gpumemnet.tracing.api.trace` takes a model object,
:func:`~gpumemnet.tracing.api.trace_file` a file that builds one, and
:func:`~gpumemnet.tracing.script.start.trace_script` a whole training script.  Importing this package
loads no torch.
"""

from __future__ import annotations

from gpumemnet.tracing.api import ExtraResults, trace, trace_file
from gpumemnet.tracing.result import TraceAnswer
from gpumemnet.tracing.script.start import trace_script

__all__ = ["ExtraResults", "TraceAnswer", "trace", "trace_file", "trace_script"]
