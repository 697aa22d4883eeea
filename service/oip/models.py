"""The models of the protocol: the whole predictor, which chooses among its bundles, and every
bundle by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.features.vector import FEATURE_SCHEMA
from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.model import BundleModel
from gpumemnet.predict.prediction_table import PredictionTable
from gpumemnet.predict.predictor import Predictor

from ..api.predictions import PredictionApi
from ..api.problems import located
from ..api.requests import Options
from .outputs import PredictedJobs
from .request import INPUT_NAME, InferRequest

WHOLE: Final = "gpumemnet"
"""Name of the model that is the whole predictor."""


@dataclass(frozen=True, slots=True)
class OipModel:
    """A model of the protocol.

    Attributes:
        name, version: as the protocol shows them.
        api: holds the predictor with the loaded bundles, and the recorder.
        bundle: the bundle of the model, or ``None`` for the whole predictor.
    """

    name: str
    version: str
    api: PredictionApi
    bundle: Bundle | None

    @property
    def predictor(self) -> Predictor:
        """The predictor with the loaded bundles."""
        return self.api.predictor

    @property
    def facts(self) -> Mapping[str, str]:
        """The members of the metadata beyond the protocol."""
        if self.bundle is None:
            return {"feature_schema": FEATURE_SCHEMA}
        card = self.bundle.card
        return {
            "sha256": self.bundle.sha256,
            "family": card.family,
            "encoder": card.encoder,
            "gpu": card.gpu,
            "feature_schema": FEATURE_SCHEMA,
        }

    def predict(self, request: InferRequest) -> PredictedJobs:
        """The predictions for every job of ``request``, in order; each is recorded.

        Raises:
            InvalidJobError, InvalidRequestError, UnsupportedJobError: for the invalid job or
            parameter.
        """
        options = request.options
        jobs = self.api.read(request.documents, None, f"{INPUT_NAME}[{{}}]".format)
        for error in jobs.errors.values():
            raise error
        self._check(jobs.table, options.encoder)
        try:
            predictions = self._predictions(jobs.table, options)
        except FieldError as error:
            raise located(error, "parameters") from None
        bundles = {bundle.card.name: bundle for bundle in self.predictor.bundles}
        return PredictedJobs(self.api.record(jobs.table, predictions), predictions, bundles)

    def _predictions(self, jobs: JobTable, options: Options) -> PredictionTable:
        if self.bundle is None:
            return self.predictor.predict_table(jobs, options)
        families = np.array(jobs.options("family"))[jobs.option_codes]
        parts = []
        for family in dict.fromkeys(families.tolist()):
            rows = np.flatnonzero(families == family)
            model = self._model(self.bundle, family)
            parts.append(
                (
                    rows,
                    model.predict(
                        jobs.take(rows),
                        options.bins,
                        options.coverage,
                        self.predictor.model_gpu(model, options.gpu),
                    ),
                )
            )
        return PredictionTable.join(parts, len(jobs), options.coverage)

    def _check(self, jobs: JobTable, encoder: str | None) -> None:
        """Reject a job that the model cannot predict."""
        if self.bundle is None:
            for row, error in self.predictor.refusals(jobs, encoder).items():
                path = f"{INPUT_NAME}[{row}]"
                if isinstance(error, InvalidRequestError):
                    raise InvalidRequestError(f"{error.reason} ({path})", "parameters.encoder")
                raise located(error, path)
            return
        card = self.bundle.card
        if encoder not in (None, card.encoder):
            raise InvalidRequestError(
                f"must be {card.encoder}, which {card.name} is: leave it out", "parameters.encoder"
            )
        for row, job in enumerate(jobs):
            path = f"{INPUT_NAME}[{row}]"
            if job.family not in card.families:
                raise InvalidRequestError(
                    f"is {job.family}, and {card.name} answers for {', '.join(card.families)} jobs: ask the model {WHOLE}",
                    f"{path}.family",
                )
            if card.encoder == "transformer" and not job.has_layers:
                raise InvalidRequestError(
                    f"is missing, and {card.name} needs the layers: ask the model {WHOLE}",
                    f"{path}.layers",
                )

    def _model(self, bundle: Bundle, family: str) -> BundleModel:
        return next(
            model
            for model in self.predictor.models_of(family, bundle.card.encoder)
            if model.bundle is bundle
        )


def oip_models(api: PredictionApi) -> dict[str, OipModel]:
    """All models by name; the whole predictor hides a bundle of the same name."""
    models = {
        bundle.card.name: OipModel(bundle.card.name, bundle.card.version, api, bundle)
        for bundle in api.predictor.bundles
    }
    return models | {WHOLE: OipModel(WHOLE, api.release, api, None)}
