"""Options and models of a batch: everything that the answers depend on, except the jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumemnet.errors import UnsupportedJobError
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.bins import BinScheme
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.predict.predictor import Predictor


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a batch.

    Attributes:
        bundles: folders of the bundles; empty for the shipped ones.
        bins, coverage, gpu, encoder: see :meth:`gpumemnet.predict.predictor.Predictor.predict_table`.
        id_column: column of the job ids; by default ``job_id`` or ``id``, if the file has one.
    """

    bundles: tuple[str, ...] = ()
    bins: BinScheme | None = None
    coverage: float = DEFAULT_COVERAGE
    gpu: str | None = None
    encoder: str | None = None
    id_column: str | None = None

    def predictor(self) -> Predictor:
        """Loads the models."""
        return Predictor.load(*self.bundles) if self.bundles else Predictor.default()


@dataclass(frozen=True, slots=True)
class Names:
    """The strings that answers repeat; answers store positions in these tuples.

    Attributes:
        models: names of the models.
        hashes: hashes of their bundles, in the same order.
        gpus: names of the GPUs that answers may be for.
    """

    models: tuple[str, ...]
    hashes: tuple[str, ...]
    gpus: tuple[str, ...]


def checked_names(predictor: Predictor, options: BatchOptions) -> Names:
    """Checks that the models support ``options``; returns the names in its answers.

    Raises:
        InvalidRequestError: when no model supports the coverage, the GPU or the encoder.
    """
    gpus: set[str] = set()
    for family in _families(predictor, options):
        for model in predictor.models_reaching(options.coverage, family, options.encoder):
            model.level(options.coverage)
            gpus.add(model.place(options.gpu).gpu)
    bundles = predictor.bundles
    return Names(tuple(bundle.card.name for bundle in bundles), tuple(bundle.sha256 for bundle in bundles), tuple(sorted(gpus)))


def _families(predictor: Predictor, options: BatchOptions) -> Iterable[str]:
    """The families that have a model with the requested encoder; if none has, the first family, whose error says so."""
    known: list[str] = []
    refused: list[str] = []
    for family in FAMILIES:
        try:
            predictor.models_of(family)
        except UnsupportedJobError:
            continue
        try:
            predictor.models_of(family, options.encoder)
        except ValueError:
            refused.append(family)
        else:
            known.append(family)
    return known or refused[:1]
