"""``python -m service``: starts the REST service, in this process or in several workers."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpumemnet.errors import GpumemnetError

if TYPE_CHECKING:
    from service.settings import Settings

BACKLOG: Final = 2048
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the idle time of common proxies and client pools, so that it is they who close a connection."""

MULTIPROCESS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Tells prometheus_client, when it is loaded, where several processes gather their metrics."""

logger = logging.getLogger("gpumemnet.service")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the service until SIGTERM or SIGINT; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m service",
        description="Serve predictions over HTTP.",
        epilog="Every setting is a variable too, and there are more of them: docs/service.md.",
    )
    parser.add_argument("--host", help="address to listen on (GPUMEMNET_HOST; 127.0.0.1)")
    parser.add_argument("--port", help="TCP port; 0 takes a free one (GPUMEMNET_PORT; 8000)")
    parser.add_argument("--workers", help="processes that answer (GPUMEMNET_WORKERS; 1)")
    parser.add_argument(
        "--bundles", help=f"bundle folders, separated by '{os.pathsep}' (GPUMEMNET_BUNDLES; those of the package)"
    )
    parser.add_argument("--registry", help="folder of the model registry (GPUMEMNET_REGISTRY; none)")
    parser.add_argument("--database-url", help="where observations are kept, or 'off' (GPUMEMNET_DATABASE_URL)")
    parser.add_argument("--log-level", help="critical, error, warning, info or debug (GPUMEMNET_LOG_LEVEL; info)")
    parser.add_argument("--log-format", help="json or text (GPUMEMNET_LOG_FORMAT; json)")
    given = vars(parser.parse_args(arguments))
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # before numpy is loaded: more threads slow these small products down
    try:
        return _run(given)
    except GpumemnetError as error:
        parser.exit(2, f"gpumemnet service: {error}\n")


def _run(given: dict[str, str | None]) -> int:
    from service.settings import read_settings, unknown_variables  # pydantic takes a tenth of a second that --help need not wait for

    settings = read_settings(**given)
    from service.operation.logs import install_logging

    install_logging(settings.log_level, settings.log_format)
    for warning in unknown_variables(os.environ):
        logger.warning(warning)
    with _listen(settings) as listener:
        if settings.workers == 1:
            return _serve(settings, listener, lambda: _say_listening(listener, settings))
        return _serve_in_workers(settings, listener)


def _listen(settings: Settings) -> socket.socket:
    from service.settings import SettingsError

    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}): choose another with --host and --port"
        ) from None


def _say_listening(listener: socket.socket, settings: Settings) -> None:
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logger.info("listening on %s with %d worker%s", address, settings.workers, "s" if settings.workers > 1 else "")


def _serve_in_workers(settings: Settings, listener: socket.socket) -> int:
    own_folder = None if settings.metrics_dir else tempfile.mkdtemp(prefix="gpumemnet-metrics-")
    os.environ[MULTIPROCESS_VARIABLE] = str(own_folder or settings.metrics_dir)
    from service.operation.metrics import clean_metrics_dir, forget_process
    from service.settings import SettingsError
    from service.supervisor import supervise

    folder = Path(own_folder or str(settings.metrics_dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean_metrics_dir(folder)
    except OSError as error:
        raise SettingsError(f"GPUMEMNET_METRICS_DIR {folder} cannot be used ({error.strerror})") from None
    import service.app  # noqa: F401 - once, for all workers

    gc.collect()
    gc.freeze()  # pages that no collection writes to stay shared between the workers
    try:
        return supervise(
            settings.workers,
            lambda say_ready: _serve(settings, listener, say_ready),
            on_ready=lambda: _say_listening(listener, settings),
            on_death=forget_process,
            shutdown_seconds=settings.shutdown_seconds,
        )
    finally:
        if own_folder is not None:
            shutil.rmtree(own_folder, ignore_errors=True)


def _serve(settings: Settings, listener: socket.socket, on_ready: Callable[[], None]) -> int:
    import uvicorn

    from service.app import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready()

    try:
        app = create_app(settings)
    except GpumemnetError as error:
        sys.stderr.write(f"gpumemnet service: {error}\n")
        return 2
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    gc.collect()
    gc.freeze()  # what is loaded now stays: without this a full collection stops all answers for some 10 ms
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn raises the signal again when it has shut down; that is no failure
    server = Server(config)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
