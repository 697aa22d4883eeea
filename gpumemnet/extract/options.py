"""What the caller states of a job beside its model: how it is trained, and facts that override
those of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.layers import check_count
from gpumemnet.job.training_job import FAMILIES, MAX_BATCH_SIZE, TrainingJob, TrainingOptions

DEFAULT_GPU: Final = "A100"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractOptions(TrainingOptions):
    """The training options, and facts of the model; a fact that is ``None`` is read off the model.

    Attributes:
        family, activation_function, sequence_length: as in
        :class:`~gpumemnet.job.training_job.TrainingJob`.
        gpu: name or alias of a GPU in the catalogue; it decides which attention kernel PyTorch
            chooses.

    Raises:
        InvalidJobError: names the field and its values.
        InvalidRequestError: the catalogue has no such GPU.
    """

    family: str | None = None
    activation_function: str | None = None
    sequence_length: int | None = None
    gpu: str = DEFAULT_GPU

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        device_profile(self.gpu)
        known = {"family": FAMILIES[0], **self.job_fields()}
        TrainingJob(
            batch_size=1, input_elements=1, total_activations=0, total_parameters=0, **known
        )

    def job_fields(self) -> dict[str, Any]:
        """The options, and the facts that are stated, as fields of a job."""
        facts = {
            name: getattr(self, name)
            for name in ("family", "activation_function", "sequence_length")
        }
        return {
            **TrainingOptions.job_fields(self),
            **{name: value for name, value in facts.items() if value is not None},
        }


DEFAULT_OPTIONS: Final = ExtractOptions()


def check_batch_size(batch_size: int | None) -> None:
    """Check a batch size before any model is loaded; ``None`` is that of the inputs.

    Raises:
        InvalidJobError: names its limits.
    """
    if batch_size is not None:
        check_count(batch_size, "batch_size", 1, MAX_BATCH_SIZE)
