"""Keys: made by the command, known by their hash, asked for by scope, and needed wherever others
can reach the service."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from gpumemnet.atomic_files import Document
from service.api.access import parse_keys
from service.api.admission import rule_of
from tests.conftest import StartService

KEYS = {scope: f"the key for {scope}" for scope in ("predict", "observe")}
PROBLEM = "application/problem+json"


def entry(name: str, scopes: str, key: str) -> str:
    return f"{name}:{scopes}:{sha256(key.encode()).hexdigest()}"


@dataclass(frozen=True)
class Locked:
    client: httpx.Client
    log: Path


@pytest.fixture(scope="module")
def locked(start_service: StartService) -> Iterator[Locked]:
    """A service that asks for keys: one for each scope, one for two of them."""
    keys = [entry(scope, scope, key) for scope, key in KEYS.items()] + [
        entry("both", "predict+observe", "both")
    ]
    with (
        start_service(GPUMEMNET_API_KEYS=",".join(keys)) as running,
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        yield Locked(client, running.log)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_command_makes_a_key_and_its_entry() -> None:
    command = [
        sys.executable,
        "-m",
        "gpumemnet",
        "keys",
        "new",
        "--name",
        "ci",
        "--scopes",
        "predict+observe",
    ]
    made = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    found = [re.findall(r"^  ([\w-]{43})$", text, re.MULTILINE) for text in made]
    keys = [key for (key,) in found]
    assert keys[0] != keys[1]
    for key, text in zip(keys, made, strict=True):
        line = entry("ci", "predict+observe", key)
        assert line in text
        known = parse_keys(line)[sha256(key.encode()).digest()]
        assert known.scopes == {"predict", "observe"}


def test_a_file_has_comments_and_several_lines() -> None:
    text = f"# of the site\n\n{entry('a', 'predict', 'x')}  # the scheduler\n{entry('b', 'observe', 'y')}\n"
    ring = parse_keys(text)
    names = [ring[sha256(key).digest()].name for key in (b"x", b"y")]
    assert (len(ring), names) == (2, ["a", "b"])


SECRET = "this-is-the-key-and-not-its-hash"


@pytest.mark.parametrize(
    "entries",
    [
        SECRET,
        f"a:predict:{SECRET}",
        f"a:root:{'0' * 64}",
        f"a::{'0' * 64}",
        f"a b:predict:{'0' * 64}",
        f"a:predict:{'0' * 63}",
    ],
)
def test_a_wrong_entry_ends_the_start_and_is_not_repeated(entries: str) -> None:
    good = entry("good", "predict", "x")
    with pytest.raises(ValueError, match="number 2 must be name:scopes:hash") as caught:
        parse_keys(f"{good},{entries}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("name", "key"), [("a", "y"), ("b", "x")])
def test_names_and_keys_occur_once(name: str, key: str) -> None:
    with pytest.raises(ValueError, match="two keys of one name, or one key under two names"):
        parse_keys(f"{entry('a', 'predict', 'x')},{entry(name, 'observe', key)}")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_no_method_gets_round_the_key(locked: Locked, method: str) -> None:
    answer = locked.client.request(method, "/v1/models")
    assert answer.status_code == 401
    assert bool(answer.content) == (method != "HEAD")
    assert locked.client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/v1/predict", "predict"),
        ("POST", "/v1/predict/batch", "predict"),
        ("POST", "/v1/batch-sizes", "predict"),
        ("GET", "/v1/gpus", "predict"),
        ("GET", "/v1/models", "predict"),
        ("POST", "/v1/observations", "observe"),
    ],
)
def test_a_path_needs_a_key_of_its_scope(
    locked: Locked, method: str, path: str, scope: str
) -> None:
    answer = locked.client.request(method, path)
    assert (
        answer.status_code,
        answer.headers["www-authenticate"],
        answer.headers["content-type"],
    ) == (401, "Bearer", PROBLEM)
    assert answer.json()["type"] == "urn:gpumemnet:problem:unauthorized"
    assert locked.client.request(method, path, headers=bearer("wrong")).status_code == 401
    assert locked.client.request(method, path, headers=bearer("x" * 10_000)).status_code == 401
    for other, key in KEYS.items():
        status = locked.client.request(method, path, headers=bearer(key)).status_code
        assert (status in (401, 403)) == (other != scope), other
    assert locked.client.request(method, path, headers=bearer("both")).status_code != 401


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v3/models",
        "/V1/models",
        "//v1/models",
        "/healthz/",
        "/metrics/",
    ],
)
def test_a_path_that_nobody_opened_is_closed(locked: Locked, path: str) -> None:
    assert rule_of(path).scope is not None
    assert locked.client.request("GET", path).status_code == 401
    assert locked.client.request("GET", path, headers=bearer("both")).status_code in (403, 404)


def test_the_log_names_keys_and_never_holds_one(locked: Locked, job: Document) -> None:
    for key in (KEYS["predict"], "a-key-that-is-wrong"):
        locked.client.post("/v1/predict", json={"job": job}, headers=bearer(key))
    locked.client.get("/healthz")
    text = locked.log.read_text()
    assert not [key for key in (*KEYS.values(), "a-key-that-is-wrong") if key in text]
    assert sha256(KEYS["predict"].encode()).hexdigest() not in text


def test_with_keys_any_host_is_answered(locked: Locked) -> None:
    headers = {**bearer(KEYS["predict"]), "Host": "gpumemnet.svc:8000"}
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
