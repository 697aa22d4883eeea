"""``python -m service``: starts the REST service on uvicorn, in this process or in several
workers."""

from __future__ import annotations

import logging
import logging.config
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final, NoReturn

from gpumemnet.compiled import NOT_COMPILED, is_compiled
from gpumemnet.errors import GpumemnetError

from .api.monitoring import log_configuration
from .settings import PREFIX, Settings, SettingsError, read_settings, unknown_variables

SHUTDOWN_SECONDS: Final = 20
"""How long accepted requests may take to finish after SIGTERM."""
IDLE_SECONDS: Final = 75
"""How long a connection may stay open between two requests; longer than the pools of common
proxies."""

logger = logging.getLogger("gpumemnet.service")


def main(given: Mapping[str, str]) -> int:
    """Run the service until SIGTERM or SIGINT; returns the exit code.

    Args:
        given: settings of the command line, by name.
    """
    signal.signal(signal.SIGTERM, _leave)
    try:
        read_settings(**given)  # its errors name the options
        # Workers read their settings from the environment.
        os.environ |= {PREFIX + name.upper(): value for name, value in given.items()}
        return _serve(read_settings())
    except KeyboardInterrupt:
        return 0
    except GpumemnetError as error:
        sys.stderr.write(f"gpumemnet service: {error}\n")
        return 2


def _serve(settings: Settings) -> int:
    logging.config.dictConfig(log_configuration(settings.log_level))
    for sentence in unknown_variables(os.environ):
        logger.warning("%s", sentence)
    if not is_compiled():
        logger.warning("%s", NOT_COMPILED)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(
            variable, "1"
        )  # before numpy is loaded: more threads slow down such small matrix products
    with _listen(settings.host, settings.port) as listener:
        os.environ[f"{PREFIX}PORT"] = str(listener.getsockname()[1])
        if settings.workers > 1:
            return _serve_with_workers(settings, listener)
        import uvicorn

        from .app import create_app

        config = uvicorn.Config(create_app(read_settings()), **uvicorn_options(settings))
        uvicorn.Server(config).run([listener])
    return 0


def _serve_with_workers(settings: Settings, listener: socket.socket) -> int:
    """uvicorn starts the workers, and replaces those that die."""
    import uvicorn
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.supervisors import Multiprocess

    class Workers(Multiprocess):
        """Stops listening before the workers end: a client that is not accepted would wait in
        vain."""

        def terminate_all(self) -> None:
            listener.close()
            super().terminate_all()

    settings.keys()  # here, so that a mistake is one sentence
    application = f"{__package__}.app:worker_app"
    config = uvicorn.Config(
        application, factory=True, workers=settings.workers, **uvicorn_options(settings)
    )
    with tempfile.TemporaryDirectory(prefix="gpumemnet-metrics-") as folder:
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
        supervisor = Workers(config, [listener])
        supervisor.run()
    failed = any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes)
    return 2 if failed else 0


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """uvicorn's options."""
    return {
        "loop": "uvloop",
        "http": f"{__package__}.api.admission:LenientProtocol",
        "ws": "none",
        "lifespan": "on",
        "log_config": log_configuration(settings.log_level),
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": IDLE_SECONDS,
        "timeout_graceful_shutdown": SHUTDOWN_SECONDS,
        "timeout_worker_healthcheck": 60,  # a worker that starts on a busy machine is not hung
    }


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another with --host and --port"
        ) from None


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End on a SIGTERM before the first request, or after uvicorn has answered the last.

    An exception would be lost, and the signal with it, when the signal arrives while Python frees
    an object.
    """
    os._exit(0)


if __name__ == "__main__":
    import typer

    from .cli import serve

    typer.run(serve)
