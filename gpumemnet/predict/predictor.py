"""Predicts the memory of jobs in process, from bundles.  Loads numpy and onnxruntime, never torch.

A predictor chooses the bundles of the job's family and asks them in turn (:mod:`gpumemnet.predict.model`) for an
:class:`~gpumemnet.predict.estimate.Estimate`.  It holds no state that changes and may be shared by threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from gpumemnet.errors import BundleError, FieldError, InvalidRequestError, UnsupportedJobError
from gpumemnet.features.vector import total_matrix, with_layers
from gpumemnet.job.job_batch import JobBatch, layer_counts, some_of
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.predict.bins import BinScheme
from gpumemnet.predict.bundle import ALL_FAMILIES, ENCODERS, Bundle, load_bundle, shipped_bundles
from gpumemnet.predict.estimate import DEFAULT_COVERAGE, Estimate
from gpumemnet.predict.estimates import Part, in_order
from gpumemnet.predict.model import BundleModel, Looked, load_session
from gpumemnet.predict.reasons import outside_rows
from gpumemnet.predict.support import against_batch

TRUST: Final = ("observed", "measured", "published", "traced")
"""Provenance of the labels that a model learnt from, the most trustworthy first: what jobs took at this very site leads."""
_FAMILY_ORDER: Final = (*FAMILIES, ALL_FAMILIES)


class Predictor:
    """Answers for the families of its bundles.

    Of several bundles for a family, those that learnt from measurements are asked first: the first whose support holds a job
    answers for it, and where none does the one with the fewest options, layer kinds and values that it has not seen.  The
    MLP-based encoder of the family answers unless the transformer-based, or the model that all families have in common, is asked
    for.  A bundle given later takes the place of one with the same family, encoder and provenance.

    Raises:
        BundleError: when there is no bundle, two have one name, or a graph does not run.
    """

    def __init__(self, bundles: Iterable[Bundle]) -> None:
        chosen = {(bundle.card.family, bundle.card.encoder, _trust(bundle)): bundle for bundle in bundles}
        if not chosen:
            raise BundleError("no bundle to predict with: give a bundle folder, or install the package with its own")
        names = [bundle.card.name for bundle in chosen.values()]
        if len(set(names)) < len(names):
            raise BundleError(f"two bundles are called {max(names, key=names.count)}: give each model a name of its own")
        ordered = sorted(chosen, key=lambda key: (_FAMILY_ORDER.index(key[0]), key[2], ENCODERS.index(key[1])))
        self._bundles = tuple(chosen[key] for key in ordered)
        self._of_family: dict[str, dict[str, list[BundleModel]]] = {}
        for bundle in self._bundles:
            session = load_session(bundle)
            for family in bundle.card.families:
                models = self._of_family.setdefault(family, {}).setdefault(bundle.card.encoder, [])
                models.append(BundleModel(bundle, family, session))

    @classmethod
    def default(cls) -> Predictor:
        """A predictor with the bundles that ship inside the package."""
        return cls(shipped_bundles())

    @classmethod
    def load(cls, *folders: str | Path) -> Predictor:
        """A predictor with the bundles in ``folders``."""
        return cls(load_bundle(folder) for folder in folders)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles in use, by family, the most trusted first."""
        return self._bundles

    def models_for(self, job: TrainingJob, encoder: str | None = None) -> list[BundleModel]:
        """The models that may answer for ``job``, in the order in which they are asked.

        Args:
            job: the job.
            encoder: ``mlp``, ``transformer`` or ``common``; the MLP-based where there is one unless given.

        Raises:
            InvalidRequestError: when no model of the family has that encoder, or it needs layers that the job does not state.
            UnsupportedJobError: when no bundle is loaded for the job's family.
        """
        models = self.models_of(job.family, encoder)
        if models[0].needs_layers and not job.layers:
            raise _without_layers()
        return models

    def models_of(self, family: str, encoder: str | None = None) -> list[BundleModel]:
        """The models for jobs of ``family``, as :meth:`models_for` gives them for a job; errors likewise."""
        by_encoder = self._of_family.get(family)
        if by_encoder is None:
            raise UnsupportedJobError(
                f"no model for {family} jobs is loaded: there is one for {', '.join(self._of_family)}", "family"
            )
        models = by_encoder.get(encoder or next(iter(by_encoder)))
        if models is None:
            raise InvalidRequestError(
                f"must be one of {', '.join(by_encoder)} for {family} jobs, not {describe(encoder)}", "encoder"
            )
        return models

    def models_reaching(self, coverage: float, family: str, encoder: str | None = None) -> list[BundleModel]:
        """The models for jobs of ``family`` that were calibrated for ``coverage``; where none is, asking the first says why.

        A model that learnt from few jobs reaches no high coverage, and then the next one is asked instead.  Errors as
        :meth:`models_of`.
        """
        models = self.models_of(family, encoder)
        return [model for model in models if model.reaches(coverage)] or models[:1]

    def unanswered(self, jobs: JobBatch, encoder: str | None = None) -> list[int]:
        """Positions of the jobs for which :meth:`models_for` raises an error."""
        is_refused, needs_layers = np.zeros((2, len(jobs.option_sets)), dtype=np.bool_)
        for code, family in enumerate(jobs.options("family")):
            try:
                needs_layers[code] = self.models_of(family, encoder)[0].needs_layers
            except FieldError:
                is_refused[code] = True
        refused = is_refused[jobs.option_codes] | (needs_layers[jobs.option_codes] & (jobs.layer_counts == 0))
        return np.flatnonzero(refused).tolist()

    def predict(
        self,
        job: TrainingJob,
        *,
        bins: BinScheme | None = None,
        coverage: float = DEFAULT_COVERAGE,
        gpu: str | None = None,
        encoder: str | None = None,
    ) -> Estimate:
        """The estimate of one job.

        Args:
            job: the job.
            bins: bin scheme of the probabilities; 1 GiB up to the capacity of the GPU unless given.
            coverage: share of jobs that the safe bytes shall cover.
            gpu: name or alias of the GPU; the one that the model learnt from unless given.
            encoder: ``mlp`` or ``transformer``, of the family; ``common``, of all families together.

        Raises:
            InvalidRequestError: on a coverage that the bundle is not calibrated for, an unknown GPU or encoder.
            UnsupportedJobError: when no bundle is loaded for the job's family.
        """
        models = self.models_reaching(coverage, job.family, encoder)
        if models[0].needs_layers and not job.layers:
            raise _without_layers()
        for model in models:
            answer = model.answer(job, bins, coverage, model.place(gpu))
            if answer is not None:
                return answer
        return self.estimate((job,), bins=bins, coverage=coverage, gpu=gpu, encoder=encoder)[0]

    def estimate(
        self,
        jobs: Sequence[TrainingJob],
        *,
        bins: BinScheme | None = None,
        coverage: float = DEFAULT_COVERAGE,
        gpu: str | None = None,
        encoder: str | None = None,
    ) -> list[Estimate]:
        """Estimates of many jobs, in order, with few runs of each graph; arguments and errors as :meth:`predict`."""
        return in_order(self.parts(jobs, bins=bins, coverage=coverage, gpu=gpu, encoder=encoder), len(jobs))

    def parts(
        self,
        jobs: Sequence[TrainingJob],
        *,
        bins: BinScheme | None = None,
        coverage: float = DEFAULT_COVERAGE,
        gpu: str | None = None,
        encoder: str | None = None,
    ) -> list[Part]:
        """The same answers as arrays, by the model that gives them; of a :class:`~gpumemnet.job.job_batch.JobBatch` without
        objects.

        Every job is in one of the parts; there is none for no jobs.
        """
        asked = []
        for family, rows in _rows_of_families(jobs).items():
            models, own = self.models_reaching(coverage, family, encoder), some_of(jobs, rows)
            if models[0].needs_layers and not layer_counts(own).all():
                raise _without_layers()
            asked.append((models, rows, own))
        return [
            part if own is jobs else Part([rows[row] for row in part.rows], part.estimates)
            for models, rows, own in asked
            for part in _cascade(models, own, bins, coverage, gpu)
        ]


def _rows_of_families(jobs: Sequence[TrainingJob]) -> dict[str, Sequence[int]]:
    """The families, and the positions of their jobs."""
    if len(jobs) == 1:
        return {jobs[0].family: range(1)}
    if isinstance(jobs, JobBatch):
        names = jobs.options("family")
        families: Iterable[str] = [names[code] for code in np.unique(jobs.option_codes).tolist()]
    else:
        families = [job.family for job in jobs]
    distinct = dict.fromkeys(families)
    if len(distinct) == 1:
        return dict.fromkeys(distinct, range(len(jobs)))
    if isinstance(jobs, JobBatch):
        families = map(names.__getitem__, jobs.option_codes.tolist())
    rows: dict[str, list[int]] = {family: [] for family in distinct}
    for row, family in enumerate(families):
        rows[family].append(row)
    return dict(rows)


def _without_layers() -> InvalidRequestError:
    return InvalidRequestError("is transformer, which needs the job's layers, and this job states totals only", "encoder")


def _cascade(
    models: Sequence[BundleModel], jobs: Sequence[TrainingJob], bins: BinScheme | None, coverage: float, gpu: str | None
) -> list[Part]:
    """Every job from the first model whose support holds it, else from the one that has not seen the fewest things of it."""
    if isinstance(jobs, JobBatch) and len(models) > 1 and all(model.support.takes_batches for model in models):
        return list(_batch_cascade(models, jobs, bins, coverage, gpu))
    place = models[0].place(gpu)
    looked = models[0].look(jobs, place)
    if len(models) == 1 or not outside_rows(looked.against.reasons):
        return [Part(range(len(jobs)), models[0].estimate(jobs, bins, coverage, place, looked))]
    views = [(list(range(len(jobs))), looked)]
    left = [row for row, reasons in enumerate(looked.against.reasons) if reasons]
    for model in models[1:]:
        looked = model.look(some_of(jobs, left), model.place(gpu))
        views.append((left, looked))
        left = [row for row, reasons in zip(left, looked.against.reasons, strict=True) if reasons]
        if not left:
            break
    nearest: dict[int, int] = {}
    if left:
        against = [dict(zip(rows, looked.against.counts, strict=True)) for rows, looked in views]
        for row in left:
            counts = [counted[row] for counted in against]
            nearest[row] = counts.index(min(counts))
    parts = []
    for number, (rows, looked) in enumerate(views):
        mine = [at for at, row in enumerate(rows) if not looked.against.reasons[at] or nearest.get(row) == number]
        if mine:
            answered, model = [rows[at] for at in mine], models[number]
            seen = looked if len(mine) == len(rows) else looked.take(mine)
            parts.append(Part(answered, model.estimate(some_of(jobs, answered), bins, coverage, model.place(gpu), seen)))
    return parts


def _batch_cascade(
    models: Sequence[BundleModel], jobs: JobBatch, bins: BinScheme | None, coverage: float, gpu: str | None
) -> Iterator[Part]:
    """The same of a batch: first who answers for which jobs, then the features of each job once."""
    left, own, totals = np.arange(len(jobs)), jobs, total_matrix(jobs)
    views = []
    choice = np.zeros(len(jobs), dtype=np.int64)
    fewest = np.full(len(jobs), np.iinfo(np.int64).max)
    for number, model in enumerate(models):
        reasons = model.glance(own, model.place(gpu), totals)
        views.append((left, own, totals, reasons))
        is_nearer = reasons.counts < fewest[left]
        nearer = left[is_nearer]
        choice[nearer], fewest[nearer] = number, reasons.counts[is_nearer]
        is_left = reasons.counts > 0
        if not is_left.any():
            break
        if not is_left.all():
            left, own, totals = left[is_left], own.take(np.flatnonzero(is_left)), totals[is_left]
    for number, (rows, own, totals, reasons) in enumerate(views):
        mine = np.flatnonzero(choice[rows] == number)
        if not len(mine):
            continue
        if len(mine) < len(rows):
            rows, own, totals, reasons = rows[mine], own.take(mine), totals[mine], reasons.take(mine)
        place = models[number].place(gpu)
        looked = Looked(with_layers(totals, own, place.blas_workspace_bytes), against_batch(reasons))
        yield Part(rows.tolist(), models[number].estimate(own, bins, coverage, place, looked))


def _trust(bundle: Bundle) -> int:
    provenance = bundle.card.document["training_data"].get("provenance")
    return TRUST.index(provenance) if provenance in TRUST else len(TRUST)
