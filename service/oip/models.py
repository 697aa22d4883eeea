"""The models that the protocol shows: the whole predictor, which chooses among its bundles, and every bundle by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpumemnet.errors import BundleError, FieldError, InvalidRequestError
from gpumemnet.features.vector import FEATURE_SCHEMA
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.model import BundleModel
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.predictor import Predictor

from ..api.answers import Answerer
from ..api.examples import EXAMPLE_JOBS
from ..api.problems import located
from .outputs import Row
from .request import INPUT_NAME, InferRequest

WHOLE: Final = "gpumemnet"
"""The model that is the whole predictor."""


@dataclass(frozen=True, slots=True)
class OipModel:
    """A model of the protocol.

    Attributes:
        name, version: as the protocol shows them.
        answerer: what its bundles are loaded in, and who takes note of predictions.
        bundle: the one bundle that answers, or ``None`` where the predictor chooses.
    """

    name: str
    version: str
    answerer: Answerer
    bundle: Bundle | None

    @property
    def predictor(self) -> Predictor:
        """What its bundles are loaded in."""
        return self.answerer.predictor

    @property
    def facts(self) -> Mapping[str, str]:
        """What the metadata say of it beyond the protocol."""
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

    def predict(self, request: InferRequest) -> list[Row]:
        """A prediction of every job of ``request``, in order, each noted.

        Raises:
            InvalidRequestError, UnsupportedJobError: at the job or the parameter that cannot be answered.
        """
        estimates = self._estimates(request)
        bundles = {bundle.card.name: bundle for bundle in self.predictor.bundles}
        return [
            Row(self.answerer.noted(job, estimate), estimate, bundles[estimate.estimator])
            for job, estimate in zip(request.jobs, estimates, strict=True)
        ]

    def check(self) -> None:
        """Let the model answer an example job of each of its families.

        Raises:
            BundleError: when it fails.
        """
        bundles = self.predictor.bundles if self.bundle is None else (self.bundle,)
        for bundle in bundles:
            try:
                for family in bundle.card.families:
                    job = job_from_dict(EXAMPLE_JOBS[family])
                    self._model(bundle, job).predict(JobTable.from_jobs((job,)), None, bundle.card.coverages[-1])
            except Exception as error:  # whatever a foreign graph makes onnxruntime and numpy raise
                raise BundleError(f"{bundle.source}: the model does not answer ({type(error).__name__}: {error})") from error

    def _estimates(self, request: InferRequest) -> list[Prediction]:
        for index, job in enumerate(request.jobs):
            self._check(job, request.encoder, index)
        try:
            if self.bundle is None:
                table = JobTable.from_jobs(request.jobs)
                options = {"bins": request.bins, "coverage": request.coverage, "gpu": request.gpu, "encoder": request.encoder}
                return list(self.predictor.predict_table(table, **options))
            return self._of_bundle(self.bundle, request)
        except FieldError as error:
            raise located(error, "parameters") from None

    def _of_bundle(self, bundle: Bundle, request: InferRequest) -> list[Prediction]:
        estimates: dict[int, Prediction] = {}
        for family in dict.fromkeys(job.family for job in request.jobs):
            rows = [row for row, job in enumerate(request.jobs) if job.family == family]
            jobs = [request.jobs[row] for row in rows]
            model = self._model(bundle, jobs[0])
            answers = model.predict(JobTable.from_jobs(jobs), request.bins, request.coverage, model.place(request.gpu))
            estimates |= zip(rows, answers, strict=True)
        return [estimates[row] for row in range(len(request.jobs))]

    def _check(self, job: TrainingJob, encoder: str | None, index: int) -> None:
        """Refuse a job that the model cannot answer for."""
        place = f"{INPUT_NAME}[{index}]"
        if self.bundle is None:
            try:
                self.predictor.models_for(job, encoder)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{error.reason} ({place})", "parameters.encoder") from None
            except FieldError as error:
                raise located(error, place) from None
            return
        card = self.bundle.card
        if encoder not in (None, card.encoder):
            raise InvalidRequestError(f"must be {card.encoder}, which {card.name} is: leave it out", "parameters.encoder")
        if job.family not in card.families:
            raise InvalidRequestError(
                f"is {job.family}, and {card.name} answers for {', '.join(card.families)} jobs: ask the model {WHOLE}",
                f"{place}.family",
            )
        if card.encoder == "transformer" and not job.has_layers:
            raise InvalidRequestError(f"is missing, and {card.name} needs the layers: ask the model {WHOLE}", f"{place}.layers")

    def _model(self, bundle: Bundle, job: TrainingJob) -> BundleModel:
        return next(model for model in self.predictor.models_for(job, bundle.card.encoder) if model.bundle is bundle)


def oip_models(answerer: Answerer) -> dict[str, OipModel]:
    """All models by name; a bundle that is called as the whole predictor is hidden by it."""
    models = {
        bundle.card.name: OipModel(bundle.card.name, bundle.card.version, answerer, bundle)
        for bundle in answerer.predictor.bundles
    }
    return models | {WHOLE: OipModel(WHOLE, answerer.release, answerer, None)}
