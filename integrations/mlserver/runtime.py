"""A runtime for MLServer, which speaks the Open Inference Protocol to KServe's and Triton's clients.

The input is one BYTES tensor of jobs as JSON, the output one BYTES tensor of predictions as JSON, as
``POST /v1/predict`` of the service answers them.  The request's parameters are options of
:class:`gpumemnet.predict.prediction.PredictionOptions`: ``coverage``, ``gpu`` and ``encoder``.
"""

import json
from typing import Any

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse

from gpumemnet.errors import FieldError
from gpumemnet.job.json_codec import parse_json, read_jobs
from gpumemnet.predict.predictor import Predictor

OPTIONS = ("coverage", "gpu", "encoder")


class Runtime(MLModel):
    """Predicts the GPU memory of jobs."""

    async def load(self) -> bool:
        """Load the bundles of the folder that ``uri`` names; those of the package without one."""
        uri = self.settings.parameters and self.settings.parameters.uri
        self.predictor = Predictor.load(uri) if uri else Predictor.default()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Predict the jobs of one request as one table.

        Raises:
            InferenceError: names the invalid job and its field; MLServer answers 400.
        """
        given: dict[str, Any] = payload.parameters.model_dump() if payload.parameters else {}
        options = {name: given[name] for name in OPTIONS if given.get(name) is not None}
        try:
            texts = StringCodec.decode_input(payload.inputs[0])
            table, _, errors = read_jobs([parse_json(text) for text in texts])
            errors = errors or self.predictor.refusals(table, options.get("encoder"))
            for row, error in errors.items():
                raise InferenceError(f"job {row}: {error}")
            documents = self.predictor.predict_table(table, **options).documents()
        except FieldError as error:
            raise InferenceError(str(error)) from None
        predictions = [json.dumps(document) for document in documents]
        return InferenceResponse(
            model_name=self.name, outputs=[StringCodec.encode_output("prediction", predictions)]
        )
