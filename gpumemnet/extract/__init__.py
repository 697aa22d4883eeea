"""Turns a PyTorch model into a :class:`~gpumemnet.job.training_job.TrainingJob`, without a GPU and
without allocating weights.

:func:`extract_job` takes a model object.  :func:`extract_file` takes what
:func:`~gpumemnet.extract.factory.factory_request` makes of ``path/to/file.py:factory``, and runs the
file in a child process.  Importing this package loads no torch.
"""

from gpumemnet.extract.extraction import Extraction, ExtractOptions, extract_file, extract_job

__all__ = ["ExtractOptions", "Extraction", "extract_file", "extract_job"]
