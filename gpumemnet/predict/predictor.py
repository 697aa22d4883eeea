"""Predicts the memory of jobs in process, from bundles; needs numpy and onnxruntime, not torch.

A predictor selects the bundles of a job's family and tries them in order
(:mod:`gpumemnet.predict.model`).  The result is a
:class:`~gpumemnet.predict.prediction.PredictionTable`.  A predictor is immutable, so threads
may share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.errors import (
    BundleError,
    FieldError,
    InvalidJobError,
    InvalidRequestError,
    UnsupportedJobError,
)
from gpumemnet.gpu import GENERIC_BLAS_WORKSPACE_BYTES
from gpumemnet.job.job_table import Array, Indices, JobTable
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.predict.bundle import Bundle, load_bundles, shipped_bundles
from gpumemnet.predict.bundle_card import ALL_FAMILIES, ENCODERS
from gpumemnet.predict.features import feature_matrix
from gpumemnet.predict.gpu_context import GpuResolver, PredictionGpu
from gpumemnet.predict.model import CERTAIN_COLUMNS, BundleModel, ModelGpu, load_session
from gpumemnet.predict.prediction import Prediction, PredictionOptions, PredictionTable
from gpumemnet.predict.support import Unseen

TRUST: Final = ("observed", "measured", "published", "traced")
"""Provenance of training labels, most trusted first; ``observed`` labels come from jobs at the
user's site."""
_UNKNOWN: Final = 2**62
"""Start value of a minimum, larger than the number of unseen options, kinds and values of any
job."""
_BEYOND_ALL: Final = 2**61
"""Distance of a model without a limit for the job, larger than any number of unseen values."""
_FAMILY_ORDER: Final = (*FAMILIES, ALL_FAMILIES)


class Predictor:
    """Predicts the memory of jobs of the families that its bundles cover.

    When a family has several bundles, the predictor tries them in order of :data:`TRUST`.  The
    first whose support contains a job predicts it.  If none does, the model with the fewest unseen
    options, layer kinds and values predicts it.  The default encoder is the family's ``mlp``;
    ``transformer`` and ``common`` are available by name.  A later bundle replaces an earlier one
    with the same family, encoder and provenance.

    Args:
        bundles: the bundles.
        gpu: the GPU that answers are for where none is asked for; by default that of the most
            trusted labels.
        context_bytes: the CUDA context of the site; by default what
            :mod:`gpumemnet.predict.gpu_context` finds.
        keeps_label_context: whether each model answers for its own GPU with the context of its own
            labels.  Answers can then be compared with these labels; they are of no use for a job.

    Raises:
        BundleError: when there is no bundle, two bundles have the same name, or a graph does not
            run.
        InvalidRequestError: when the GPU is unknown or the context impossible.
    """

    def __init__(
        self,
        bundles: Iterable[Bundle],
        *,
        gpu: str | None = None,
        context_bytes: int | None = None,
        keeps_label_context: bool = False,
    ) -> None:
        chosen = {
            (bundle.card.family, bundle.card.encoder, _trust(bundle)): bundle for bundle in bundles
        }
        if not chosen:
            raise BundleError(
                "no bundle to predict with: give a bundle folder, or install the package with its own"
            )
        names = [bundle.card.name for bundle in chosen.values()]
        if len(set(names)) < len(names):
            raise BundleError(
                f"two bundles are called {max(names, key=names.count)}: give each model a name of its own"
            )
        ordered = sorted(
            chosen, key=lambda key: (_FAMILY_ORDER.index(key[0]), key[2], ENCODERS.index(key[1]))
        )
        self._bundles = tuple(chosen[key] for key in ordered)
        self._of_family: dict[str, dict[str, list[BundleModel]]] = {}
        for bundle in self._bundles:
            session = load_session(bundle)
            for family in bundle.card.families:
                models = self._of_family.setdefault(family, {}).setdefault(bundle.card.encoder, [])
                models.append(BundleModel(bundle, family, session))
        self._gpus = GpuResolver(sorted(self._bundles, key=_trust), gpu, context_bytes)
        self._keeps_label_context = keeps_label_context

    @classmethod
    def default(cls, **settings: Any) -> Predictor:
        """Creates a predictor with the bundles shipped in the package; the settings are those of
        the class."""
        return cls(shipped_bundles(), **settings)

    @classmethod
    def load(cls, *folders: str | Path, **settings: Any) -> Predictor:
        """Creates a predictor with the bundles in ``folders``, or in their folders; the settings
        are those of the class."""
        return cls((bundle for folder in folders for bundle in load_bundles(folder)), **settings)

    def prediction_gpu(self, gpu: str | None) -> PredictionGpu:
        """The GPU called ``gpu``, with the context that predictions for it contain; by default the
        predictor's.

        Raises:
            InvalidRequestError: when neither the catalogue nor a bundle knows it.
        """
        return self._gpus.resolve(gpu)

    def model_gpu(self, model: BundleModel, gpu: str | None) -> ModelGpu:
        """The GPU called ``gpu``, as ``model`` sees it; by default the predictor's.

        Raises:
            InvalidRequestError: when neither the catalogue nor a bundle knows it.
        """
        if self._keeps_label_context and (
            gpu is None or self.prediction_gpu(gpu).gpu == model.card.gpu
        ):
            return model.label_gpu
        return model.model_gpu(self.prediction_gpu(gpu))

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles in use, ordered by family, most trusted first."""
        return self._bundles

    def models_of(self, family: str, encoder: str | None = None) -> list[BundleModel]:
        """The models that can predict jobs of ``family``, in the order in which they are tried.

        Args:
            family: the job family.
            encoder: ``mlp``, ``transformer`` or ``common``; by default ``mlp`` if the family has
                it, else its first encoder.

        Raises:
            InvalidRequestError: when no model of the family has that encoder.
            UnsupportedJobError: when no bundle is loaded for the family.
        """
        by_encoder = self._of_family.get(family)
        if by_encoder is None:
            raise UnsupportedJobError(
                f"no model for {family} jobs is loaded: there is one for {', '.join(self._of_family)}",
                "family",
            )
        models = by_encoder.get(encoder or next(iter(by_encoder)))
        if models is None:
            raise InvalidRequestError(
                f"must be one of {', '.join(by_encoder)} for {family} jobs, not {describe(encoder)}",
                "encoder",
            )
        return models

    def models_reaching(
        self, coverage: float, family: str, encoder: str | None = None
    ) -> list[BundleModel]:
        """The models for jobs of ``family`` that are calibrated for ``coverage``.

        If there are none, the list holds the first model, whose
        :meth:`~gpumemnet.predict.model.BundleModel.predict` raises the error.  A model trained on
        few jobs is not calibrated for high coverages; the next model then takes over.

        Raises:
            InvalidRequestError, UnsupportedJobError: as :meth:`models_of`.
        """
        models = self.models_of(family, encoder)
        return [model for model in models if model.reaches(coverage)] or models[:1]

    def refusals(self, table: JobTable, encoder: str | None = None) -> dict[int, FieldError]:
        """Every row that no model can predict → the error: no bundle of its family, missing layers,
        an impossible traced peak."""
        errors: list[FieldError | None] = []
        needs_layers = []
        for family in table.options("family"):
            try:
                needs_layers.append(self.models_of(family, encoder)[0].needs_layers)
                errors.append(None)
            except FieldError as error:
                needs_layers.append(True)
                errors.append(error)
        impossible = _impossible_peaks(table)
        if not any(needs_layers):
            return impossible
        is_refused = np.array([error is not None for error in errors])[table.option_codes]
        is_without = np.array(needs_layers)[table.option_codes] & (table.layer_counts == 0)
        return impossible | {
            row: errors[table.option_codes[row]] or _layers_needed()
            for row in (is_refused | is_without).nonzero()[0].tolist()
        }

    def predict(self, job: TrainingJob, **options: Any) -> Prediction:
        """Predicts the memory of one job.

        Args:
            job: the job.
            options: see :class:`~gpumemnet.predict.prediction.PredictionOptions`.

        Raises:
            InvalidRequestError: when the bundle is not calibrated for the coverage, or the GPU or
                encoder is unknown.
            UnsupportedJobError: when no bundle is loaded for the job's family.
        """
        return self.predict_table(JobTable.from_jobs((job,)), **options)[0]

    def predict_many(self, jobs: Sequence[TrainingJob], **options: Any) -> PredictionTable:
        """Predicts the memory of several jobs, in order; options and errors as in
        :meth:`predict`."""
        return self.predict_table(JobTable.from_jobs(jobs), **options)

    def predict_table(
        self, jobs: JobTable, options: PredictionOptions | None = None, **keywords: Any
    ) -> PredictionTable:
        """Predicts the memory of all jobs of a table, in order, in batches; errors as in
        :meth:`predict`.

        Args:
            jobs: the jobs.
            options: the options; by default those given as keyword arguments.
            keywords: see :class:`~gpumemnet.predict.prediction.PredictionOptions`.
        """
        if options is None:
            options = PredictionOptions(**keywords)
        for error in _impossible_peaks(jobs).values():
            raise error
        tasks = []
        for family, rows in _rows_of_families(jobs):
            models = self.models_reaching(options.coverage, family, options.encoder)
            own = jobs if len(rows) == len(jobs) else jobs.take(rows)
            if models[0].needs_layers and not own.layer_counts.all():
                raise _layers_needed()
            tasks.append((models, rows, own))
        parts = [
            (rows[predicted], predictions)
            for models, rows, own in tasks
            for predicted, predictions in self._cascade(models, own, options)
        ]
        return (
            parts[0][1]
            if len(parts) == 1
            else PredictionTable.join(parts, len(jobs), options.coverage)
        )

    def _cascade(
        self, models: Sequence[BundleModel], table: JobTable, options: PredictionOptions
    ) -> list[tuple[Indices, PredictionTable]]:
        """Predicts each job with the first model whose support contains it, else with the nearest.

        The nearest has the fewest unseen values, among those whose closed form is calibrated for
        the job if there are any.

        Returns:
            For each model that predicts at least one job, the positions of its jobs and their
            predictions.
        """
        left_rows, left_jobs = np.arange(len(table)), table
        features, workspace = None, None
        trials = []
        for model in models:
            model_gpu = self.model_gpu(model, options.gpu)
            if features is None or model_gpu.prediction_gpu.blas_workspace_bytes != workspace:
                features, workspace = (
                    model.features(left_jobs, model_gpu),
                    model_gpu.prediction_gpu.blas_workspace_bytes,
                )
            unseen = model.support.check(left_jobs, features)
            trials.append(_Trial(model, model_gpu, left_rows, features, unseen))
            is_left = ~unseen.is_inside
            if not is_left.any():
                break
            if not is_left.all():
                rows = is_left.nonzero()[0]
                left_rows, left_jobs, features = (
                    left_rows[rows],
                    left_jobs.take(rows),
                    features[rows],
                )
        choice = _nearest(trials, len(table)) if len(trials) > 1 else None
        parts = []
        for number, (model, model_gpu, rows, features, unseen) in enumerate(trials):
            if choice is not None:
                mine = (choice[rows] == number).nonzero()[0]
                if not len(mine):
                    continue
                if len(mine) < len(rows):
                    rows, features, unseen = rows[mine], features[mine], unseen.take(mine)
            parts.append(
                (
                    rows,
                    model.predict(
                        unseen.table, options.bins, options.coverage, model_gpu, features, unseen
                    ),
                )
            )
        return parts


class _Trial(NamedTuple):
    """A model, the GPU as it sees it, the rows that no earlier model's support contains, their
    features, what it has not seen."""

    model: BundleModel
    model_gpu: ModelGpu
    rows: Indices
    features: Array
    unseen: Unseen


def _nearest(trials: Sequence[_Trial], count: int) -> Indices:
    """For each of ``count`` rows, the position of the trial that is nearest to it; the first of
    equals."""
    choice = np.zeros(count, dtype=np.int64)
    fewest = np.full(count, _UNKNOWN)
    for number, (_, _, rows, _, unseen) in enumerate(trials):
        has_limit = unseen.is_by_closed_form | (unseen.counts == 0)
        distance = np.where(
            unseen.is_inside, 0, np.where(has_limit, unseen.counts, unseen.counts + _BEYOND_ALL)
        )
        is_nearer = distance < fewest[rows]
        nearer = rows[is_nearer]
        choice[nearer], fewest[nearer] = number, distance[is_nearer]
    return choice


def _rows_of_families(table: JobTable) -> list[tuple[str, Indices]]:
    """The families of the jobs in order of first appearance, each with the positions of its
    jobs."""
    families = table.options("family")
    if len(set(families)) == 1:
        return [(families[0], np.arange(len(table)))] if len(table) else []
    names = list(dict.fromkeys(families))
    codes = np.array([names.index(family) for family in families], dtype=np.int64)[
        table.option_codes
    ]
    present, first = np.unique(codes, return_index=True)
    return [
        (names[code], (codes == code).nonzero()[0]) for code in present[first.argsort()].tolist()
    ]


def _impossible_peaks(table: JobTable) -> dict[int, FieldError]:
    """Every row whose traced peak is below what its training step holds for sure → the error."""
    peaks = table.column("traced_peak_bytes")
    rows = peaks.nonzero()[0]
    if not len(rows):
        return {}
    least = feature_matrix(table.take(rows), GENERIC_BLAS_WORKSPACE_BYTES)[:, CERTAIN_COLUMNS].sum(
        axis=1
    )
    return {
        row: InvalidJobError(
            f"is {peak:,} bytes, below the {math.floor(amount):,} bytes of parameters, gradients and optimizer state: give the "
            "reserved bytes that gpumemnet trace reports, in bytes",
            "traced_peak_bytes",
        )
        for row, peak, amount in zip(
            rows.tolist(), peaks[rows].astype(np.int64).tolist(), least.tolist(), strict=True
        )
        if peak < amount
    }


def _layers_needed() -> InvalidRequestError:
    return InvalidRequestError("'transformer' needs `layers`; send them, or use 'mlp'", "encoder")


def _trust(bundle: Bundle) -> int:
    provenance = bundle.card.provenance
    return TRUST.index(provenance) if provenance in TRUST else len(TRUST)
