"""Settings come from the environment, arguments before it, and say what is wrong with them."""

import os
from pathlib import Path

import pytest

from service.settings import PREFIX, Settings, SettingsError, read_settings, unknown_variables

HASH = "0" * 64


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_without_variables_the_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings() == Settings()
    monkeypatch.setenv("GPUMEMNET_PORT", "")
    assert read_settings(host=None) == Settings()


def test_every_setting_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "host": ("::1", "::1"),
        "port": ("9000", 9000),
        "workers": ("3", 3),
        "gpu": ("L4", "L4"),
        "context_mib": ("700", 700),
        "bundles": (os.pathsep.join(["/a", "b/c"]), (Path("/a"), Path("b/c"))),
        "registry": ("/r", Path("/r")),
        "max_body_bytes": ("2048", 2048),
        "max_concurrency": ("8", 8),
        "api_keys": (f"a:predict:{HASH}", f"a:predict:{HASH}"),
        "api_keys_file": ("/k", Path("/k")),
        "allowed_hosts": ("A.example., 10.0.0.7", frozenset({"a.example", "10.0.0.7"})),
        "database_url": ("off", "off"),
        "log_level": ("WARNING", "warning"),
    }
    assert wanted.keys() == Settings.model_fields.keys()
    for name, (text, _) in wanted.items():
        monkeypatch.setenv(PREFIX + name.upper(), text)
    settings = read_settings()
    assert {name: getattr(settings, name) for name in wanted} == {
        name: value for name, (_, value) in wanted.items()
    }
    assert all(value != Settings.model_fields[name].default for name, (_, value) in wanted.items())


def test_an_argument_takes_precedence_even_over_a_bad_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUMEMNET_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("GPUMEMNET_HOST", "a")
    settings = read_settings(port="81", host="localhost")
    assert (settings.port, settings.host) == (81, "localhost")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("PORT", value) for value in ("x", "-1", "65536", "8.5")),
        *(("MAX_BODY_BYTES", value) for value in ("1023", "4 MiB")),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"GPUMEMNET_{variable}", value)
    with pytest.raises(SettingsError, match=rf"^GPUMEMNET_{variable} must be .*, not "):
        read_settings()


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^--log-level must be .* not 'loud'"):
        read_settings(log_level="loud")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-host.example"])
def test_without_keys_only_this_machine_is_served(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    with pytest.raises(SettingsError, match="needs API keys"):
        read_settings(host=host)
    monkeypatch.setenv("GPUMEMNET_API_KEYS", f"a:predict:{HASH}")
    assert read_settings(host=host).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_a_loopback_address_no_key_is_needed(host: str) -> None:
    assert read_settings(host=host).host == host


def test_a_variable_that_is_no_setting_is_pointed_out() -> None:
    assert (
        unknown_variables(
            {"GPUMEMNET_PORT": "1", "GPUMEMNET_URL": "x", "GPUMEMNET_COMPILE": "1", "OTHER": "y"}
        )
        == []
    )
    of_kubernetes = (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT_8000_TCP",
        "PORT_8000_TCP_ADDR",
    )
    assert unknown_variables(dict.fromkeys((PREFIX + name for name in of_kubernetes), "x")) == []
    (warning,) = unknown_variables({"GPUMEMNET_WORKER": "2"})
    assert "did you mean 'GPUMEMNET_WORKERS'?" in warning
