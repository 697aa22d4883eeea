"""Serves the same predictions with plain FastAPI, for benchmarks/http_latency.py: ``python
http_peers.py minimal|async|def PORT``."""

import sys

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict

from gpumemnet.job.json_codec import job_from_dict, parse_json, read_jobs
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB, ceil_mib


class LayerModel(BaseModel):
    """One layer."""

    kind: str
    activations: int
    parameters: int = 0


class JobModel(BaseModel):
    """A job: the fields that the benchmark sends, and some others."""

    model_config = ConfigDict(extra="forbid")
    family: str
    batch_size: int
    input_elements: int
    optimizer: str
    precision: str
    layers: list[LayerModel] = []
    total_activations: int | None = None
    total_parameters: int | None = None
    activation_function: str | None = None
    sequence_length: int | None = None


class PredictBody(BaseModel):
    """The body of a request."""

    job: JobModel
    coverage: float = 0.99


class BinModel(BaseModel):
    """The most probable bin."""

    index: int
    lower_mib: int
    upper_mib: int | None
    probability: float


class AnswerBody(BaseModel):
    """The body of an answer."""

    bin: BinModel
    request_mib: int
    limit_mib: int | None
    coverage: float
    in_support: bool
    reasons: list[str]
    bin_width_mib: int
    probabilities: list[float]
    gpu: str
    label_source: str
    model: str


def main(kind: str, port: int) -> None:
    """Serve on ``port`` until interrupted; ``kind`` is ``minimal``, ``async`` or ``def``."""
    predictor = Predictor.default()
    app = FastAPI()

    def predict(body: PredictBody) -> AnswerBody:
        estimate = predictor.predict(job_from_dict(body.job.model_dump()), coverage=body.coverage)
        lower_bytes, upper_bytes = estimate.bins.bounds_bytes(estimate.bin_index)
        return AnswerBody(
            bin=BinModel(
                index=estimate.bin_index,
                lower_mib=lower_bytes // MIB,
                upper_mib=upper_bytes and upper_bytes // MIB,
                probability=float(estimate.probabilities.max()),
            ),
            request_mib=ceil_mib(estimate.expected_bytes),
            limit_mib=estimate.safe_bytes and ceil_mib(estimate.safe_bytes),
            coverage=estimate.coverage,
            in_support=estimate.in_support,
            reasons=list(estimate.reasons),
            bin_width_mib=estimate.bins.width_bytes // MIB,
            probabilities=estimate.probabilities.tolist(),
            gpu=estimate.gpu,
            label_source=estimate.label_source,
            model=estimate.estimator,
        )

    if kind == "minimal":  # nothing but FastAPI and onnxruntime: the whole document, no validation

        @app.post("/v1/predict")
        async def predict_minimally(request: Request) -> Response:
            question = parse_json(await request.body())
            table = read_jobs([question["job"]]).table
            [document] = predictor.predict_table(table).documents()
            return Response(orjson.dumps(document), media_type="application/json")

    elif kind == "async":

        @app.post("/v1/predict")
        async def predict_on_the_loop(body: PredictBody) -> AnswerBody:
            return predict(body)
    else:
        app.post("/v1/predict")(predict)

    uvicorn.run(
        app, port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
