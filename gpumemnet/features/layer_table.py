"""The layers of many jobs as flat columns, as the closed form and the layer sequence read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_batch import JobBatch
from gpumemnet.job.layers import CODE_OF_KIND, KINDS, OTHER_CODE
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.closed_form import GROUPS

_GROUP_OF_CODE: Final = np.array(GROUPS, dtype=np.int64)
_KIND, _ACTIVATIONS, _PARAMETERS = map(itemgetter, range(3))


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """All layers of ``B`` jobs, one after the other; ``N`` layers in all.

    Attributes:
        counts: number of layers of each job, shape ``[B]``.
        kind: code of the layer's kind (:data:`gpumemnet.job.layers.CODE_OF_KIND`), shape ``[N]``.
        activations: output elements per sample, shape ``[N]``.
        parameters: parameter elements, shape ``[N]``.
    """

    counts: NDArray[np.int64]
    kind: NDArray[np.int64]
    activations: NDArray[np.float64]
    parameters: NDArray[np.float64]

    @property
    def owner(self) -> NDArray[np.int64]:
        """The job that each layer belongs to, shape ``[N]``."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def group(self) -> NDArray[np.int64]:
        """Position of each layer's group in :data:`gpumemnet.job.layers.GROUP_NAMES`, shape ``[N]``."""
        return _GROUP_OF_CODE[self.kind]


def layer_table(jobs: Sequence[TrainingJob]) -> LayerTable:
    """The layers of ``jobs`` in columns."""
    if isinstance(jobs, JobBatch):
        kinds = jobs.layer_kinds
        return LayerTable(
            counts=jobs.layer_counts,
            kind=np.where(kinds < len(KINDS), kinds, OTHER_CODE) if jobs.strange_kinds else kinds,
            activations=jobs.layer_activations,
            parameters=jobs.layer_parameters,
        )
    layers = [*chain.from_iterable([job.layers for job in jobs])]
    count = len(layers)
    return LayerTable(
        counts=np.array([len(job.layers) for job in jobs], dtype=np.int64),
        kind=np.fromiter(map(CODE_OF_KIND.get, map(_KIND, layers), repeat(OTHER_CODE)), np.int64, count),
        activations=np.fromiter(map(_ACTIVATIONS, layers), np.float64, count),
        parameters=np.fromiter(map(_PARAMETERS, layers), np.float64, count),
    )
