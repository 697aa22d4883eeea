"""A job's memory, byte by byte, without a GPU: ``gpumemnet.trace(model, inputs, optimizer="adamw", precision="bf16")``.

The step is run on meta tensors with what CUDA would do differently corrected, every storage's birth and death is recorded, and
the events are replayed through a simulator of PyTorch's caching allocator.  The package is itself the function, so that it reads
in a user's program as in the sentence above; its parts are loaded on first use, so that importing it costs no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.errors import MissingExtraError

if TYPE_CHECKING:
    from gpumemnet.tracing.model_trace import trace_model
    from gpumemnet.tracing.options import Questions
    from gpumemnet.tracing.process import trace_file, trace_script
    from gpumemnet.tracing.report.answer import TraceAnswer

__all__ = ["Questions", "TraceAnswer", "trace_file", "trace_model", "trace_script"]

_HOMES: Final = {
    "Questions": "gpumemnet.tracing.options",
    "TraceAnswer": "gpumemnet.tracing.report.answer",
    "trace_file": "gpumemnet.tracing.process",
    "trace_model": "gpumemnet.tracing.model_trace",
    "trace_script": "gpumemnet.tracing.process",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "extract", "tracing a model") from None


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> TraceAnswer:
        """See :func:`gpumemnet.tracing.model_trace.trace_model`."""
        answer: TraceAnswer = __getattr__("trace_model")(*args, **kwargs)
        return answer


sys.modules[__name__].__class__ = _CallableModule
