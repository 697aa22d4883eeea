"""The service's settings: read once from the environment, validated, and then immutable.

Every setting is a variable with the prefix ``GPUMEMNET_``, as container platforms expect
(twelve-factor app, III).  A command-line argument takes precedence, and its variable is then not
read.  The documentation lists all settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gpumemnet.errors import GpumemnetError, did_you_mean
from gpumemnet.gpu import MAX_CONTEXT_MIB
from gpumemnet.job.layers import describe
from gpumemnet.units import MIB

from .api.access import (
    ANY,
    LOOPBACK,
    ApiKey,
    is_loopback_name,
    parse_hosts,
    parse_keys,
)

PREFIX: Final = "GPUMEMNET_"
BUILD_VARIABLE: Final = "GPUMEMNET_COMPILE"
"""Read when the package is installed (``hatch_build.py``)."""
CLIENT_VARIABLES: Final = (
    *("GPUMEMNET_URL", "GPUMEMNET_API_KEY", "GPUMEMNET_API_KEY_FILE", "GPUMEMNET_TIMEOUT_SECONDS"),
    "GPUMEMNET_JOB",
)
"""Variables of clients, which may be set in the same environment."""

_OF_KUBERNETES: Final = re.compile(PREFIX + r"(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?")
"""Variables that Kubernetes sets for a Service with the name ``gpumemnet``."""
OFF: Final = "off"
DATABASE_FILE: Final = "observations.sqlite3"


class SettingsError(GpumemnetError):
    """A setting of the service cannot be used."""


def _of_text(read: Callable[[str], object]) -> BeforeValidator:
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def _folders(text: str) -> tuple[Path, ...]:
    return tuple(map(Path, filter(None, text.split(os.pathsep))))


class Settings(BaseSettings):
    """The settings of the service; a field's variable is its name in capitals after
    ``GPUMEMNET_``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )
    host: str = "127.0.0.1"
    """address to listen on; anything but a loopback address needs API keys"""
    port: int = Field(ge=0, le=65535, default=8000)
    """TCP port; 0 takes a free one"""
    workers: int = Field(ge=1, le=64, default=1)
    """processes that answer; one per core that is to be used"""
    bundles: Annotated[tuple[Path, ...], NoDecode, _of_text(_folders)] = ()
    """folders of bundles to answer from, or folders of such, separated by `:`; those of the package when empty"""
    gpu: str | None = None
    """GPU that answers are for where none is asked for; that of the most trusted labels when empty"""
    context_mib: Annotated[int, Field(ge=1, le=MAX_CONTEXT_MIB)] | None = None
    """CUDA context of the site's processes, on any GPU that is not calibrated; the catalogue's when empty"""
    registry: Path | None = None
    """folder of the model registry; the shipped release answers without one"""
    max_body_bytes: int = Field(ge=1024, le=1024 * MIB, default=4 * MIB)
    """largest request body; the default holds a job of 20,000 layers and a batch of 1,000 ordinary jobs"""
    max_concurrency: int = Field(ge=1, le=100_000, default=256)
    """most requests at work in a worker; more get 503 at once instead of waiting"""
    api_keys: str = ""
    """`name:scopes:sha256` of each key, separated by commas; scopes are predict and observe, joined by `+`"""
    api_keys_file: Path | None = None
    """a file with one such key a line, `#` begins a comment; a change counts within seconds"""
    allowed_hosts: Annotated[frozenset[str] | None, NoDecode, _of_text(parse_hosts)] = Field(
        default=None,
        description="hosts that requests may name in `Host` and `Origin`, separated by commas; `loopback` for the names of this "
        "machine alone, `*` for any; when empty, `loopback` without API keys and `*` with them",
    )
    database_url: str = Field(default="", repr=False)  # may hold a password
    """where observations are kept: a SQLAlchemy URL, `off`, or when empty a SQLite file in the state folder"""
    log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"], _of_text(str.lower)
    ] = "info"
    """`critical`, `error`, `warning`, `info` or `debug`"""

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    def keys(self) -> dict[bytes, ApiKey] | None:
        """The API keys by the hash of each; ``None`` when there are none, and no key is required.

        Raises:
            SettingsError: names the variable and the invalid entry.
        """
        texts: dict[str, str] = {}
        if self.api_keys:
            texts[f"{PREFIX}API_KEYS"] = self.api_keys
        if self.api_keys_file is not None:
            try:
                texts[f"{PREFIX}API_KEYS_FILE"] = self.api_keys_file.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(
                    f"{PREFIX}API_KEYS_FILE {self.api_keys_file} cannot be read: {error}"
                ) from None
        for variable, text in texts.items():
            try:
                if not parse_keys(text):
                    raise ValueError("holds no key: give one, or do not set it")
            except ValueError as error:
                raise SettingsError(f"{variable} {error}") from None
        return parse_keys("\n".join(texts.values())) if texts else None

    def hosts(self) -> frozenset[str]:
        """The hosts that requests may be addressed to."""
        return self.allowed_hosts or frozenset({ANY if self.has_keys else LOOPBACK})

    def observations(self) -> str | None:
        """The URL of the database of observations; ``None`` when it is off."""
        if self.database_url:
            return None if self.database_url.lower() == OFF else self.database_url
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return f"sqlite:///{Path(state) / 'gpumemnet' / DATABASE_FILE}"


def read_settings(**arguments: Any) -> Settings:
    """Settings from ``arguments`` that are not ``None``, and otherwise from the environment.

    Raises:
        SettingsError: names the variable or the argument, its value and the allowed values.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise SettingsError(_sentence(error, given)) from None
    if not settings.has_keys and not is_loopback_name(settings.host.lower()):
        raise SettingsError(
            f"listening on {describe(settings.host)} needs API keys, because others can reach it: set {PREFIX}API_KEYS or "
            f"{PREFIX}API_KEYS_FILE (gpumemnet keys new makes one), or listen on 127.0.0.1"
        )
    return settings


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable that has the prefix but is no setting: otherwise a typing error
    would stay unnoticed."""
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    warnings = []
    for name in sorted(environment):
        if (
            name.startswith(PREFIX)
            and name not in (*known, *CLIENT_VARIABLES, BUILD_VARIABLE)
            and not _OF_KUBERNETES.fullmatch(name)
        ):
            hint = did_you_mean(name, known, "the page Settings of the documentation lists them")
            warnings.append(f"{name[:80]} is no setting of the service: {hint}")
    return warnings


def _sentence(error: ValidationError, given: Mapping[str, Any]) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0])
    origin = f"--{name.replace('_', '-')}" if name in given else PREFIX + name.upper()
    if "error" in first.get("ctx", {}):
        return f"{origin} {first['ctx']['error']}"
    return (
        f"{origin} {first['msg'].replace('Input should', 'must')}, not {describe(first['input'])}"
    )
