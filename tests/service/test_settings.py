"""Settings come from the environment, arguments before it, and say what is wrong with them."""

import os
from pathlib import Path

import pytest

from service.settings import Settings, SettingsError, read_settings


def test_without_variables_the_defaults_hold():
    assert read_settings({}) == Settings()
    assert read_settings({"GPUMEMNET_PORT": "", "UNRELATED": "1"}, host=None) == Settings()


def test_every_setting_has_a_variable():
    environment = {
        "GPUMEMNET_HOST": "::1",
        "GPUMEMNET_PORT": "9000",
        "GPUMEMNET_BUNDLES": os.pathsep.join(["/a", "b/c"]),
        "GPUMEMNET_MAX_BODY_BYTES": "2048",
        "GPUMEMNET_MAX_JOBS": "7",
        "GPUMEMNET_LOG_LEVEL": "WARNING",
    }
    settings = read_settings(environment)
    assert settings == Settings(
        host="::1", port=9000, bundles=(Path("/a"), Path("b/c")), max_body_bytes=2048, max_jobs=7, log_level="warning"
    )
    default = Settings()
    assert all(getattr(settings, name) != getattr(default, name) for name in Settings.__slots__)


def test_an_argument_takes_precedence_even_over_a_bad_variable():
    assert read_settings({"GPUMEMNET_PORT": "tcp://10.0.0.1:80", "GPUMEMNET_HOST": "a"}, port="81", host="b") == Settings(
        port=81, host="b"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("PORT", value) for value in ("x", "-1", "65536", "80.0", "٣", "9" * 5000, " 80")),
        *(("MAX_BODY_BYTES", value) for value in ("0", "1023", "4 MiB", "inf")),
        *(("MAX_JOBS", value) for value in ("0", "-1", "1e3")),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_named_with_its_variable(variable, value):
    with pytest.raises(SettingsError, match=rf"^GPUMEMNET_{variable} must be "):
        read_settings({f"GPUMEMNET_{variable}": value})


def test_a_bad_argument_is_named():
    with pytest.raises(SettingsError, match=r"^--log-level must be one of .* not 'loud'"):
        read_settings({}, log_level="loud")


def test_the_variable_that_kubernetes_sets_for_a_service_is_explained():
    with pytest.raises(SettingsError, match="enableServiceLinks"):
        read_settings({"GPUMEMNET_PORT": "tcp://10.96.0.12:8000"})
