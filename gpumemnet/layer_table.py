"""The layers of many jobs as flat columns: features of a thousand jobs cost a few numpy calls, and no Python loop per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job import TrainingJob
from gpumemnet.job_batch import JobBatch
from gpumemnet.layers import CODE_OF_KIND, GROUP_NAMES, GROUP_OF_KIND, KINDS, OTHER_CODE

_GROUP_OF_CODE: Final = np.array([GROUP_NAMES.index(GROUP_OF_KIND[kind]) for kind in KINDS], dtype=np.int64)

_KIND, _ACTIVATIONS, _PARAMETERS = map(itemgetter, range(3))


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """All layers of ``B`` jobs, one after the other; ``N`` layers in all.

    Attributes:
        counts: number of layers of each job, shape ``[B]``.
        owner: the job that each layer belongs to, shape ``[N]``.
        kind: code of the layer's kind (:data:`gpumemnet.layers.CODE_OF_KIND`), shape ``[N]``.
        activations: output elements per sample, shape ``[N]``.
        parameters: parameter elements, shape ``[N]``.
    """

    counts: NDArray[np.int64]
    owner: NDArray[np.int64]
    kind: NDArray[np.int64]
    activations: NDArray[np.float64]
    parameters: NDArray[np.float64]

    @property
    def group(self) -> NDArray[np.int64]:
        """Position of each layer's group in :data:`gpumemnet.layers.GROUP_NAMES`, shape ``[N]``."""
        return _GROUP_OF_CODE[self.kind]

    def without(self, rows: NDArray[np.bool_]) -> LayerTable:
        """The table without the layers in ``rows``, shape ``[N]``."""
        keep = ~rows
        owner = self.owner[keep]
        return LayerTable(
            counts=np.bincount(owner, minlength=len(self.counts)),
            owner=owner,
            kind=self.kind[keep],
            activations=self.activations[keep],
            parameters=self.parameters[keep],
        )


def layer_table(jobs: Sequence[TrainingJob]) -> LayerTable:
    """The layers of ``jobs`` in columns."""
    if isinstance(jobs, JobBatch):
        kinds = jobs.layer_kinds
        return LayerTable(
            counts=jobs.layer_counts,
            owner=np.repeat(np.arange(len(jobs)), jobs.layer_counts),
            kind=np.where(kinds < len(KINDS), kinds, OTHER_CODE) if jobs.strange_kinds else kinds,
            activations=jobs.layer_activations,
            parameters=jobs.layer_parameters,
        )
    layers = [*chain.from_iterable(job.layers for job in jobs)]
    counts = np.array([len(job.layers) for job in jobs], dtype=np.int64)
    return LayerTable(
        counts=counts,
        owner=np.repeat(np.arange(len(jobs)), counts),
        kind=np.fromiter(map(CODE_OF_KIND.get, map(_KIND, layers), repeat(OTHER_CODE)), np.int64, len(layers)),
        activations=np.fromiter(map(_ACTIVATIONS, layers), np.float64, len(layers)),
        parameters=np.fromiter(map(_PARAMETERS, layers), np.float64, len(layers)),
    )
