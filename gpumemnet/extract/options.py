"""The options of a job that a model does not tell: how it is going to be trained.

They carry the names of the fields of :class:`~gpumemnet.job.training_job.TrainingJob` and are checked by it, so a wrong value
gets the same sentence here as in a request to the service, and gets it before any model is loaded.
"""

from __future__ import annotations

from typing import Required, TypedDict

from gpumemnet.job.training_job import TrainingJob


class JobOptions(TypedDict, total=False):
    """Fields of a :class:`~gpumemnet.job.training_job.TrainingJob` that come from the caller; absent ones take the job's own
    default.

    ``family``, ``activation_function`` and ``sequence_length`` override what the model shows.
    """

    optimizer: Required[str]
    precision: Required[str]
    family: str
    activation_function: str
    sequence_length: int
    attention_kernel: str
    optimizer_implementation: str
    checkpointing: str
    channels_last: bool
    gradient_accumulation: int
    cudnn_benchmark: bool
    ranks: int


def check_options(options: JobOptions, batch_size: int | None) -> None:
    """Refuse options that no job can have.

    Raises:
        InvalidJobError: names the field and what it may be.
    """
    known: JobOptions = {"family": "mlp", **options}
    TrainingJob(
        batch_size=1 if batch_size is None else batch_size,
        input_elements=1,
        total_activations=0,
        total_parameters=0,
        **known,
    )
