"""Turns a PyTorch model into a :class:`~gpumemnet.job.training_job.TrainingJob`, without a GPU and
without allocating weights.

:func:`extract_job` takes a model object.  :func:`extract_file` takes ``path/to/file.py:factory``
and runs the file in a child process.  Both are loaded on first use; importing this package loads no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from gpumemnet.errors import MissingExtraError

if TYPE_CHECKING:
    from gpumemnet.extract.extraction import extract_job
    from gpumemnet.extract.options import ExtractOptions
    from gpumemnet.extract.process import extract_file
    from gpumemnet.extract.result import Extraction

__all__ = ["ExtractOptions", "Extraction", "extract_file", "extract_job"]

_MODULE_OF: Final = {
    "ExtractOptions": "options",
    "Extraction": "result",
    "extract_file": "process",
    "extract_job": "extraction",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "extract", "extracting a job from a model") from None
