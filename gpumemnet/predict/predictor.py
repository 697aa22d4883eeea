"""Predicts the memory of jobs in process, from bundles; needs numpy and onnxruntime, not torch.

A predictor has one bundle for each encoder (:mod:`gpumemnet.predict.model`), which answers for all
jobs.  The result is a :class:`~gpumemnet.predict.prediction.PredictionTable`.  A predictor is
immutable, so threads may share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpumemnet.errors import (
    BundleError,
    FieldError,
    InvalidJobError,
    InvalidRequestError,
    UnsupportedJobError,
)
from gpumemnet.gpu import GENERIC_BLAS_WORKSPACE_BYTES
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bundle import Bundle, load_bundles, shipped_bundles
from gpumemnet.predict.bundle_card import ENCODERS
from gpumemnet.predict.features import feature_matrix
from gpumemnet.predict.gpu_context import GpuResolver, PredictionGpu
from gpumemnet.predict.model import CERTAIN_COLUMNS, BundleModel
from gpumemnet.predict.prediction import Prediction, PredictionOptions, PredictionTable


class Predictor:
    """Predicts the memory of jobs of the families that its bundles cover.

    Args:
        bundles: the bundles; a later one replaces an earlier one with the same encoder.
        gpu: the GPU that answers are for where none is asked for; by default that of the first
            bundle's card.
        context_bytes: the CUDA context of the site; by default what
            :mod:`gpumemnet.predict.gpu_context` finds.

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
    ) -> None:
        chosen = {bundle.card.encoder: bundle for bundle in bundles}
        if not chosen:
            raise BundleError(
                "no bundle to predict with: give a bundle folder, or install the package with its own"
            )
        names = [bundle.card.name for bundle in chosen.values()]
        if len(set(names)) < len(names):
            raise BundleError(
                f"two bundles are called {names[0]}: give each model a name of its own"
            )
        self._models: dict[str, BundleModel] = {
            encoder: BundleModel(chosen[encoder]) for encoder in ENCODERS if encoder in chosen
        }
        self._gpus = GpuResolver(self.bundles, gpu, context_bytes)

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

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles in use."""
        return tuple(model.bundle for model in self._models.values())

    def model(self, encoder: str | None = None) -> BundleModel:
        """The model with an encoder; by default ``mlp`` where it is loaded.

        Raises:
            InvalidRequestError: when no model has that encoder.
        """
        model = self._models.get(encoder or next(iter(self._models)))
        if model is None:
            raise InvalidRequestError(
                f"must be one of {', '.join(self._models)}, not {describe(encoder)}", "encoder"
            )
        return model

    def refusals(self, table: JobTable, encoder: str | None = None) -> dict[int, FieldError]:
        """Every row that the model cannot predict → the error: a family that it has not learned,
        missing layers, an impossible traced peak.

        Raises:
            InvalidRequestError: when no model has that encoder.
        """
        model, refused = self.model(encoder), _impossible_peaks(table)
        families = table.options("family")
        unknown = [family not in model.card.families for family in families]
        if model.needs_layers:
            refused |= {
                row: InvalidRequestError(
                    "'transformer' needs `layers`; send them, or use 'mlp'", "encoder"
                )
                for row in (table.layer_counts == 0).nonzero()[0].tolist()
            }
        if any(unknown):
            refused |= {
                row: UnsupportedJobError(
                    f"no model for {families[table.option_codes[row]]} jobs is loaded: there is one for "
                    f"{', '.join(model.card.families)}",
                    "family",
                )
                for row in np.array(unknown)[table.option_codes].nonzero()[0].tolist()
            }
        return refused

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
        model = self.model(options.encoder)
        for error in self.refusals(jobs, options.encoder).values():
            raise error
        model_gpu = model.model_gpu(self.prediction_gpu(options.gpu))
        return model.predict(jobs, options.bins, options.coverage, model_gpu)


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
