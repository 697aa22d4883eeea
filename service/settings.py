"""The service's settings: read from the environment once, checked, and then fixed.

Every setting is a variable with the prefix ``GPUMEMNET_``, as container platforms expect it (twelve-factor app, III).  An
argument on the command line takes precedence, and the variable behind it is then not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import GpumemnetError
from gpumemnet.layers import describe
from gpumemnet.units import MIB

PREFIX: Final = "GPUMEMNET_"
LOG_LEVELS: Final = ("critical", "error", "warning", "info", "debug")


class SettingsError(GpumemnetError):
    """A setting of the service cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator may choose; the variable of a field is its name in capitals behind ``GPUMEMNET_``.

    Attributes:
        host: address to listen on; the loopback unless asked otherwise, because the service does not ask who is calling.
        port: TCP port; 0 takes a free one.
        bundles: folders of the bundles to answer from, separated by ``:`` in the variable; those of the package when empty.
        max_body_bytes: largest request body; the default holds a job of 20,000 layers and a batch of 1,000 ordinary jobs.
        max_jobs: most jobs in one batch.
        log_level: one of :data:`LOG_LEVELS`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    bundles: tuple[Path, ...] = ()
    max_body_bytes: int = 4 * MIB
    max_jobs: int = 1000
    log_level: str = "info"


def read_settings(environment: Mapping[str, str], **arguments: Any) -> Settings:
    """Settings from the environment, and from ``arguments`` that are not ``None`` before it.

    Raises:
        SettingsError: names the variable or the argument, what it holds and what it may hold.
    """
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        variable = PREFIX + setting.name.upper()
        argument = arguments.get(setting.name)
        if argument is not None:
            values[setting.name] = _parsed(setting.name, argument, f"--{setting.name.replace('_', '-')}")
        elif environment.get(variable):
            values[setting.name] = _parsed(setting.name, environment[variable], variable)
    return Settings(**values)


def _parsed(name: str, text: str, origin: str) -> Any:
    parse: Callable[[str], Any] | None = _PARSERS.get(name)
    try:
        return parse(text) if parse else text
    except ValueError as error:
        raise SettingsError(f"{origin} {error}") from None


def _whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.startswith("tcp://"):
            raise ValueError(
                f"is {describe(text)}, which Kubernetes sets for a Service of the name 'gpumemnet': "
                "turn it off with enableServiceLinks: false, or give --port"
            )
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and minimum <= int(text) <= maximum):
            raise ValueError(f"must be a whole number between {minimum} and {maximum}, not {describe(text)}")
        return int(text)

    return parse


def _log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError(f"must be one of {', '.join(LOG_LEVELS)}, not {describe(text)}")
    return text.lower()


def _folders(text: str) -> tuple[Path, ...]:
    return tuple(Path(part) for part in text.split(os.pathsep) if part)


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "port": _whole_number(0, 65535),
    "bundles": _folders,
    "max_body_bytes": _whole_number(1024, 1024 * MIB),
    "max_jobs": _whole_number(1, 100_000),
    "log_level": _log_level,
}
