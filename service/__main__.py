"""``python -m service``: starts the REST service; with several workers, it starts the
supervisor."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

from gpumemnet.compiled import NOT_COMPILED, is_compiled
from gpumemnet.errors import GpumemnetError

from .listening import address_of, listen
from .middleware.logs import configure_logs
from .server import serve
from .settings import Settings, read_settings, unknown_variables
from .supervisor import Supervisor

logger = logging.getLogger("gpumemnet.service")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the service until SIGTERM or SIGINT; returns the exit code."""
    parser = _parser()
    try:
        settings = read_settings(**vars(parser.parse_args(arguments)))
        is_for_a_person = sys.stderr.isatty() and "log_format" not in settings.model_fields_set
        if is_for_a_person:
            settings = settings.model_copy(update={"log_format": "text"})
        writer = configure_logs(settings.log_format, settings.log_level)
        for sentence in unknown_variables(os.environ):
            logger.warning("%s", sentence)
        if not is_compiled():
            logger.warning("%s", NOT_COMPILED)
        with listen(settings.host, settings.port) as listener:
            announce = partial(_announce, address_of(listener), settings.workers, is_for_a_person)
            if settings.workers > 1:
                return Supervisor(settings, listener, serve, announce).run()
            try:
                return serve(settings, listener, announce)
            finally:
                writer.sink.close()
    except KeyboardInterrupt:  # Ctrl-C before the server installs its signal handler
        return 0
    except GpumemnetError as error:
        parser.exit(2, f"gpumemnet service: {error}\n")


def _announce(address: str, workers: int, is_for_a_person: bool) -> None:
    """Log that the service is ready."""
    if is_for_a_person:
        sys.stderr.write(
            f"gpumemnet answers at {address}: a page to try it in a browser, its API at {address}/docs\n"
        )
        sys.stderr.write("Press Ctrl-C to stop.\n")
    else:
        logger.info(
            "listening on %s with %d worker%s", address, workers, "" if workers == 1 else "s"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"python -m {__package__}",
        description="Serve predictions over HTTP.",
        epilog="Every setting is a variable, listed in the documentation; these are the ones that are arguments too.",
    )
    fields = Settings.model_fields
    for name in (
        "host",
        "port",
        "workers",
        "bundles",
        "gpu",
        "context_mib",
        "registry",
        "database_url",
        "log_level",
        "log_format",
    ):
        field = fields[name]
        default = "" if field.default in (None, (), "") else f"; {field.default}"
        about = f"{field.description} (GPUMEMNET_{name.upper()}{default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}", help=about.replace("`", "'").replace("%", "%%")
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
