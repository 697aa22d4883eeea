"""``python -m service``: starts the REST service in this process, on one core."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

from gpumemnet.errors import GpumemnetError
from service.settings import Settings, SettingsError, read_settings

BACKLOG: Final = 2048
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the idle time of common proxies and client pools, so that it is they who close a connection."""

SHUTDOWN_SECONDS: Final = 20
"""After SIGTERM, accepted requests have this long to finish; Kubernetes kills after 30."""

logger = logging.getLogger("gpumemnet.service")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the service until SIGTERM or SIGINT; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m service", description="Serve predictions over HTTP.", epilog="See service/settings.py."
    )
    parser.add_argument("--host", help="address to listen on (GPUMEMNET_HOST; 127.0.0.1)")
    parser.add_argument("--port", help="TCP port; 0 takes a free one (GPUMEMNET_PORT; 8000)")
    parser.add_argument(
        "--bundles", help=f"bundle folders, separated by '{os.pathsep}' (GPUMEMNET_BUNDLES; those of the package)"
    )
    parser.add_argument("--log-level", help="critical, error, warning, info or debug (GPUMEMNET_LOG_LEVEL; info)")
    try:
        settings = read_settings(os.environ, **vars(parser.parse_args(arguments)))
        with _listen(settings) as listener:
            return _serve(settings, listener)
    except GpumemnetError as error:
        parser.exit(2, f"gpumemnet service: {error}\n")


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}): choose another with --host and --port"
        ) from None


def _serve(settings: Settings, listener: socket.socket) -> int:
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # before numpy is loaded: more threads slow these small products down
    import uvicorn

    from service.app import create_app

    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = uvicorn.Config(
        create_app(settings),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    gc.collect()
    gc.freeze()  # what is loaded now stays: without this a full collection stops all answers for some 10 ms
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn raises the signal again when it has shut down; that is no failure
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
