"""Options and models of a batch: everything that the answers depend on, except the jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumemnet.errors import UnsupportedJobError
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.distribution import BinScheme
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.predict.predictor import Predictor


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a batch.

    Attributes:
        bundles: folders of the bundles; empty for the shipped ones.
        bins, coverage, gpu, encoder: see
            :meth:`gpumemnet.predict.predictor.Predictor.predict_table`.
        context_bytes: see :class:`~gpumemnet.predict.predictor.Predictor`.
        id_column: column of the job ids; by default ``job_id`` or ``id``, if the file has one.
    """

    bundles: tuple[str, ...] = ()
    bins: BinScheme | None = None
    coverage: float = DEFAULT_COVERAGE
    gpu: str | None = None
    encoder: str | None = None
    id_column: str | None = None
    context_bytes: int | None = None

    def predictor(self) -> Predictor:
        """Loads the models."""
        settings = {"context_bytes": self.context_bytes}
        return (
            Predictor.load(*self.bundles, **settings)
            if self.bundles
            else Predictor.default(**settings)
        )


@dataclass(frozen=True, slots=True)
class Names:
    """The strings that answers repeat; answers store positions in these tuples.

    Attributes:
        models: names of the models.
        hashes: hashes of their bundles, in the same order.
        gpu: name of the GPU that the answers are for.
    """

    models: tuple[str, ...]
    hashes: tuple[str, ...]
    gpu: str


def checked_names(predictor: Predictor, options: BatchOptions) -> Names:
    """Checks that the models support ``options``; returns the names in its answers.

    Raises:
        InvalidRequestError: when no model supports the coverage, the GPU or the encoder.
    """
    for family in _families(predictor, options):
        for model in predictor.models_reaching(options.coverage, family, options.encoder):
            model.level(options.coverage)
    bundles = predictor.bundles
    return Names(
        tuple(bundle.card.name for bundle in bundles),
        tuple(bundle.sha256 for bundle in bundles),
        predictor.prediction_gpu(options.gpu).gpu,
    )


def _families(predictor: Predictor, options: BatchOptions) -> Iterable[str]:
    """The families that have a model with the requested encoder; if none has, the first family,
    whose error says so."""
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
