"""A service that predicts and observes, as a process of its own: ``python observation_app.py DATABASE_URL [QUEUE_SIZE]``."""

import socket
import sys
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from starlette.routing import Route

from gpumemnet.predict.predictor import Predictor
from service.api.answers import Answerer
from service.api.endpoint import JsonEndpoint
from service.api.problems import install_problem_handlers
from service.middleware.limits import BodyLimit
from service.observations.routes import observation_routes
from service.observations.store import ObservationStore


def main() -> None:
    store = ObservationStore(sys.argv[1], queue_size=int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
    store.prepare()
    answerer = Answerer(Predictor.default(), 1000, store)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        store.start()
        yield
        store.drain()

    routes = [Route("/v1/predict", JsonEndpoint(answerer.predict), methods=["POST"]), *observation_routes(store)]
    app = FastAPI(routes=routes, lifespan=lifespan)
    app.add_middleware(BodyLimit, max_body_bytes=4 * 2**20)
    install_problem_handlers(app)
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stderr.write(f"listening on http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stderr.flush()
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
