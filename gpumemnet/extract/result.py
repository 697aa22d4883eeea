"""What an extraction gives: the job, where each of its layers stands in the model, and what could
not be seen.

The JSON form is what the child process hands to its parent and what ``gpumemnet extract --json``
prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.training_job import TrainingJob


@dataclass(frozen=True, slots=True)
class Extraction:
    """A training job read from a model.

    Attributes:
        job: the job; its layers stand in execution order.
        layer_names: for each layer of the job, the dotted path of the module that executed it;
            empty for the model itself.
        notes: one sentence for each thing that could not be seen, or that was settled by a rule.
    """

    job: TrainingJob
    layer_names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def extraction_to_dict(extraction: Extraction) -> dict[str, Any]:
    """The JSON object ``{"job", "layer_names", "notes"}``."""
    return {
        "job": job_to_dict(extraction.job),
        "layer_names": list(extraction.layer_names),
        "notes": list(extraction.notes),
    }


def extraction_from_dict(document: Mapping[str, Any]) -> Extraction:
    """The extraction of such an object.

    Raises:
        InvalidJobError: when its job is no valid job.
    """
    return Extraction(
        job_from_dict(document["job"]), tuple(document["layer_names"]), tuple(document["notes"])
    )
