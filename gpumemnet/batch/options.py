"""What is asked about every job of a batch, and the models that answer: all that the answers depend on beside the jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumemnet.errors import UnsupportedJobError
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.bins import BinScheme
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.predict.predictor import Predictor


@dataclass(frozen=True, slots=True)
class Question:
    """The options of a batch.

    Attributes:
        bundles: folders of the bundles; the shipped ones where there are none.
        bins, coverage, gpu, encoder: as :meth:`gpumemnet.predict.predictor.Predictor.parts` takes them.
        id_column: column of the jobs' own ids; ``job_id`` or ``id``, where there is one, unless given.
    """

    bundles: tuple[str, ...] = ()
    bins: BinScheme | None = None
    coverage: float = DEFAULT_COVERAGE
    gpu: str | None = None
    encoder: str | None = None
    id_column: str | None = None

    def predictor(self) -> Predictor:
        """The models, loaded."""
        return Predictor.load(*self.bundles) if self.bundles else Predictor.default()


@dataclass(frozen=True, slots=True)
class Names:
    """The texts that answers repeat; they carry positions among them.

    Attributes:
        models: of the models.
        hashes: of their bundles, in the same order.
        gpus: that answers may be for.
    """

    models: tuple[str, ...]
    hashes: tuple[str, ...]
    gpus: tuple[str, ...]


def checked_names(predictor: Predictor, question: Question) -> Names:
    """The names in the answers to ``question``, which is one that the models can answer.

    Raises:
        InvalidRequestError: on a coverage, a GPU or an encoder that no model has.
    """
    gpus: set[str] = set()
    for family in _families(predictor, question):
        for model in predictor.models_reaching(question.coverage, family, question.encoder):
            model.level(question.coverage)
            gpus.add(model.place(question.gpu).gpu)
    bundles = predictor.bundles
    return Names(tuple(bundle.card.name for bundle in bundles), tuple(bundle.sha256 for bundle in bundles), tuple(sorted(gpus)))


def _families(predictor: Predictor, question: Question) -> Iterable[str]:
    """The families with a model; where none has the encoder that is asked for, the first, whose error says so."""
    known: list[str] = []
    refused: list[str] = []
    for family in FAMILIES:
        try:
            predictor.models_of(family)
        except UnsupportedJobError:
            continue
        try:
            predictor.models_of(family, question.encoder)
        except ValueError:
            refused.append(family)
        else:
            known.append(family)
    return known or refused[:1]
