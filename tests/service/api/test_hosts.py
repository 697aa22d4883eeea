"""The hosts that requests may be addressed to: a page whose name resolves to this machine reaches
nothing that matters."""

import httpx
import pytest

from service.api.access import allows
from service.settings import SettingsError, read_settings
from tests.conftest import StartService


@pytest.mark.parametrize("header", ["Host", "Origin"])
@pytest.mark.parametrize(
    "value",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "10.0.0.7:8000",
        "[2001:db8::1]",
        "null",
        "",
    ],
)
def test_without_keys_a_request_for_another_host_reaches_nothing(
    http: httpx.Client, header: str, value: str
) -> None:
    value = f"http://{value}" if header == "Origin" and value not in ("null", "") else value
    for method, path in (
        ("POST", "/v1/observations"),
        ("GET", "/v1/models"),
        ("GET", "/"),
    ):
        response = http.request(method, path, headers={header: value})
        assert response.status_code == 421, (path, response.text)
    assert (
        http.get("/v1/models", headers={header: value}).json()["type"]
        == "urn:gpumemnet:problem:misdirected"
    )
    assert (
        "GPUMEMNET_ALLOWED_HOSTS"
        in http.get("/v1/models", headers={header: value}).json()["detail"]
    )


@pytest.mark.parametrize(
    "value",
    [
        "localhost",
        "localhost:9",
        "LOCALHOST.",
        "127.0.0.1",
        "127.8.9.1:80",
        "[::1]:8000",
        "a.localhost",
    ],
)
def test_names_of_this_machine_are_answered(http: httpx.Client, value: str) -> None:
    assert http.get("/v1/models", headers={"Host": value}).status_code == 200
    assert http.get("/v1/models", headers={"Origin": f"http://{value}"}).status_code == 200


def test_health_and_metrics_are_answered_under_any_name(http: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert http.get(path, headers={"Host": "10.1.2.3:8000"}).status_code == 200
    refused = 'gpumemnet_refusals_total{problem="misdirected"}'
    http.get("/v1/models", headers={"Host": "evil.example"})
    [line] = [line for line in http.get("/metrics").text.splitlines() if line.startswith(refused)]
    assert float(line.split()[-1]) >= 1


def test_hosts_are_a_setting(start_service: StartService) -> None:
    with start_service(
        GPUMEMNET_ALLOWED_HOSTS="predict.example.org, 10.0.0.7, [2001:db8::1]"
    ) as running:
        for value, status in (
            *(
                ("predict.example.org:443", 200),
                ("PREDICT.example.org", 200),
                ("10.0.0.7:8000", 200),
                ("[2001:db8::1]:80", 200),
            ),
            *(("localhost", 421), ("example.org", 421)),
        ):
            assert (
                httpx.get(f"{running.url}/v1/models", headers={"Host": value}).status_code == status
            )


def test_an_empty_list_does_not_open_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMEMNET_ALLOWED_HOSTS", " , ")
    assert not allows(read_settings().hosts(), b"evil.example")
    monkeypatch.setenv("GPUMEMNET_ALLOWED_HOSTS", "a b")
    with pytest.raises(SettingsError, match="no host"):
        read_settings()
