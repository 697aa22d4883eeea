"""A service that predicts and observes, as a process of its own, whose database may be slow:
``python observation_app.py DATABASE_URL [QUEUE_SIZE]``."""

import socket
import sys
from functools import partial

import uvicorn

from service import app
from service.__main__ import uvicorn_options
from service.observations.store import ObservationStore
from service.settings import Settings


def main() -> None:
    queue_size = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    # on a busy machine the tests hold locks for seconds
    store = partial(
        ObservationStore, queue_size=queue_size, busy_seconds=300.0, answer_seconds=300.0
    )
    vars(app)["ObservationStore"] = store
    listener = socket.create_server(("127.0.0.1", 0))
    settings = Settings(database_url=sys.argv[1], port=listener.getsockname()[1])
    config = uvicorn.Config(app.create_app(settings), **uvicorn_options(settings))
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
