"""A service that predicts and observes, as a process of its own, whose database may be slow:
``python observation_app.py DATABASE_URL [QUEUE_SIZE]``."""

import socket
import sys
from functools import partial

import uvicorn

from service import app
from service.__main__ import uvicorn_options
from service.observations import store
from service.observations.database import make_engine
from service.settings import Settings


def main() -> None:
    queue_size = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    # on a busy machine the tests hold locks for seconds
    engine = partial(make_engine, busy_seconds=300.0)
    vars(store).update(MAX_WAITING=queue_size, ANSWER_SECONDS=300.0, make_engine=engine)
    listener = socket.create_server(("127.0.0.1", 0))
    settings = Settings(database_url=sys.argv[1], port=listener.getsockname()[1])
    config = uvicorn.Config(app.create_app(settings), **uvicorn_options(settings))
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
