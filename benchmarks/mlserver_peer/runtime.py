"""Serves the shipped models with MLServer, for benchmarks/http_latency.py.  It runs in an
environment of its own."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

from gpumemnet.job.json_codec import job_from_json
from gpumemnet.predict.predictor import Predictor


class Runtime(MLModel):
    """Answers jobs from the same predictor, with fewer fields than the service: three numbers and
    the probabilities."""

    async def load(self) -> bool:
        """Load the bundles of the package."""
        self.predictor = Predictor.default()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One Open Inference request, a BYTES tensor of jobs as JSON."""
        jobs = [job_from_json(text) for text in StringCodec.decode_input(payload.inputs[0])]
        estimates = self.predictor.predict_many(jobs)
        safe_bytes = [
            -1 if estimate.safe_bytes is None else estimate.safe_bytes for estimate in estimates
        ]
        return InferenceResponse(
            model_name=self.name,
            outputs=[
                NumpyCodec.encode_output(
                    "expected_bytes", np.array([estimate.expected_bytes for estimate in estimates])
                ),
                NumpyCodec.encode_output("safe_bytes", np.array(safe_bytes)),
                NumpyCodec.encode_output(
                    "probabilities", np.stack([estimate.probabilities for estimate in estimates])
                ),
            ],
        )
