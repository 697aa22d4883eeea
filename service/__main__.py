"""``python -m service``: starts the REST service; with several workers, the process that watches them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

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
        writer = configure_logs(settings.log_format, settings.log_level)
        for sentence in unknown_variables(os.environ):
            logger.warning("%s", sentence)
        with listen(settings.host, settings.port) as listener:
            if settings.workers > 1:
                return Supervisor(settings, listener, serve).run()
            try:
                return serve(settings, listener, lambda: logger.info("listening on %s with 1 worker", address_of(listener)))
            finally:
                writer.sink.close()
    except GpumemnetError as error:
        parser.exit(2, f"gpumemnet service: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"python -m {__package__}",
        description="Serve predictions over HTTP.",
        epilog="Every setting is a variable, listed in the documentation; these are the ones that are arguments too.",
    )
    fields = Settings.model_fields
    for name in ("host", "port", "workers", "bundles", "registry", "database_url", "log_level", "log_format"):
        field = fields[name]
        default = "" if field.default in (None, (), "") else f"; {field.default}"
        about = f"{field.description} (GPUMEMNET_{name.upper()}{default})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=about.replace("`", "'").replace("%", "%%"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
