"""A service that predicts and observes, as a process of its own: ``python observation_app.py
DATABASE_URL [QUEUE_SIZE]``."""

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from starlette.routing import Route

from gpumemnet.predict.predictor import Predictor
from service.api.endpoint import JsonEndpoint
from service.api.operations import routes
from service.api.predictions import PredictionApi
from service.api.problems import ProblemDocuments
from service.middleware.limits import BodyLimit
from service.observations.routes import observation_operations
from service.observations.store import ObservationStore


def main() -> None:
    queue_size = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    # on a busy machine the tests hold locks for seconds
    store = ObservationStore(
        sys.argv[1], queue_size=queue_size, busy_seconds=300.0, answer_seconds=300.0
    )
    store.prepare()
    api = PredictionApi(Predictor.default(), 1000, store)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store.start()
        yield
        store.drain()

    served = [
        Route("/v1/predict", JsonEndpoint(api.predict), methods=["POST"]),
        *routes(observation_operations(store)),
    ]
    app = FastAPI(routes=served, lifespan=lifespan)
    app.build_middleware_stack = lambda: ProblemDocuments(BodyLimit(app.router, 4 * 2**20))  # type: ignore[method-assign]
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stderr.write(f"listening on http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stderr.flush()
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
