"""A service of nothing but models, for tests: ``python serving_child.py WORKERS SHARE [REGISTRY]``;
workers share one socket."""

import logging
import os
import socket
import sys
from pathlib import Path

import orjson
import uvicorn
from fastapi import FastAPI
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpumemnet.site.releases import Registry
from service.admin.routes import admin_operations
from service.api.endpoint import JsonEndpoint
from service.api.operations import routes as operation_routes
from service.api.predictions import PredictionApi
from service.api.problems import ProblemDocuments
from service.api.records import RecordBatch
from service.serving.served_release import ServedRelease
from service.serving.shadow import Shadow
from service.serving.watch import Watcher


class Notes:
    """A store that remembers in memory."""

    def __init__(self) -> None:
        self.recorded: dict[str, str] = {}
        self.shadowed: dict[str, list[str | int | None]] = {}

    def record(self, records: RecordBatch) -> None:
        self.recorded |= {record.prediction_id: record.model_sha256 for record in records}

    def record_shadow(
        self, prediction_id: str, model_sha256: str, expected_bytes: int, safe_bytes: int | None
    ) -> None:
        self.shadowed[prediction_id] = [
            self.recorded[prediction_id],
            model_sha256,
            expected_bytes,
            safe_bytes,
        ]


def serve(listener: socket.socket, share: float, registry: Path | None) -> None:
    notes = Notes()
    shadow = Shadow(notes, share)
    serving = ServedRelease(
        lambda predictor, release: PredictionApi(predictor, 100, shadow, release),
        registry=Registry(registry) if registry else None,
        shadow=shadow,
    )
    Watcher(serving, 0.05).start()
    shadow.start()

    async def state(request: Request) -> Response:
        lines = Path("/proc/self/status").read_text().splitlines()
        resident = int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024
        found = {
            "pid": os.getpid(),
            "release": serving.release,
            "resident_mib": resident,
            "shadowed": notes.shadowed,
        }
        return Response(orjson.dumps(found))

    async def metrics(request: Request) -> Response:
        return Response(generate_latest())

    predict = JsonEndpoint(lambda body: serving.api.predict(body))
    routes = [
        Route("/v1/predict", predict, methods=["POST"]),
        Route("/state", state),
        Route("/metrics", metrics),
    ]
    app = FastAPI(routes=[*routes, *operation_routes(admin_operations(serving))])
    config = uvicorn.Config(
        ProblemDocuments(app.router),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    workers, share, *registry = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    logging.info("listening on http://127.0.0.1:%d", listener.getsockname()[1])
    for _ in range(int(workers) - 1):
        if os.fork() == 0:
            break
    serve(listener, float(share), Path(registry[0]) if registry else None)


if __name__ == "__main__":
    main()
