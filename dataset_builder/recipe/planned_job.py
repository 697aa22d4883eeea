"""A planned job: one network with the options of its run, before anything has been measured.

It holds everything that a measuring process needs.  A resumed campaign recognises finished jobs by
their keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.training_job import TrainingJob

from ..families import Architecture, Network, family
from .options import Options, parse_options, trainable_parameters

PROTOCOL: Final = "step-2"
"""Version of the training conventions of :mod:`dataset_builder.measure.training` and of the reading
protocol; stored in every row.

``step-2`` since fp32 leaves convolutions the TF32 that PyTorch lets them use.
"""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A network of a family, with its training options."""

    family: str
    architecture: Architecture
    options: Options

    @property
    def architecture_json(self) -> str:
        """The architecture as stored in the dataset."""
        return json.dumps(self.architecture.to_dict(), sort_keys=True)

    @property
    def options_json(self) -> str:
        """The options as stored in the dataset."""
        return json.dumps(self.options.to_dict(), sort_keys=True)

    @property
    def key(self) -> str:
        """16 hexadecimal digits, the same for the same job wherever and whenever it is planned."""
        text = "\n".join((self.family, self.architecture_json, self.options_json))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :func:`parse_planned` is the inverse."""
        return {
            "family": self.family,
            "architecture": self.architecture.to_dict(),
            "options": self.options.to_dict(),
        }


def parse_planned(document: Mapping[str, Any]) -> PlannedJob:
    """A planned job from :meth:`PlannedJob.to_dict`.

    Raises:
        DatasetError: on unknown, missing or impossible values.
    """
    try:
        name, architecture, options = (
            document["family"],
            document["architecture"],
            document["options"],
        )
    except (KeyError, TypeError):
        raise DatasetError("a planned job needs family, architecture and options") from None
    return PlannedJob(name, family(name).parse(architecture), parse_options(options))


def training_job(planned: PlannedJob, network: Network | None = None) -> TrainingJob:
    """The job as a scheduler knows it, with every layer.

    Args:
        planned: the job.
        network: the network's description, if the caller has it already.
    """
    network = network or family(planned.family).describe_network(planned.architecture)
    shared = planned.options.to_dict()
    share = shared.pop("frozen_share")
    return TrainingJob(
        family=network.family or planned.family,
        input_elements=network.input_elements,
        layers=network.layers,
        trainable_parameters=trainable_parameters(network.layers, share),
        activation_function=network.activation_function,
        sequence_length=network.sequence_length,
        attention_kernel=network.attention_kernel,
        **shared,
    )
