"""``POST /v1/fit``: the answer of the command line and of Python, without the server's files."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import gpumemnet
from gpumemnet.atomic_files import Document
from gpumemnet.cli import main
from gpumemnet.named.catalogue import find_model

QWEN = "Qwen/Qwen3-8B"
QUESTIONS = (
    {"model": QWEN, "method": "qlora", "sequence_length": 4096, "gpu": "RTX-4090"},
    {"model": QWEN, "method": "lora", "batch_size": 2, "kernels": "liger"},
    {"model": "meta-llama/Llama-3.1-70B", "gpu": "8xH100"},
    {"model": "stabilityai/stable-diffusion-xl-base-1.0", "method": "lora", "resolution": 512},
    {"model": "timm/convnext_base", "batch_size": 64, "precision": "amp_fp16", "gpu": "RTX-3090"},
)


def refused_field(http: httpx.Client, question: Document) -> str:
    response = http.post("/v1/fit", json=question)
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/problem+json"
    return str(response.json()["errors"][0]["field"])


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["model"])
def test_command_line_python_and_http_give_the_same_bytes(
    http: httpx.Client, question: Document, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [
        part
        for name, value in question.items()
        if name != "model"
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    code = main(["fit", question["model"], *options, "--json"])
    shown = json.loads(capfd.readouterr().out)
    answered = http.post("/v1/fit", json=question).raise_for_status().json()
    document = gpumemnet.fit(**question).document()
    written = {json.dumps(each) for each in (shown, answered, document)}
    assert len(written) == 1
    assert code == (0 if answered["fits"] else 3)


def test_a_configuration_in_the_body_is_a_model(http: httpx.Client, tmp_path: Path) -> None:
    config = dict(find_model(QWEN).config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = gpumemnet.fit(str(tmp_path), method="lora", gpu="L4").document()
    answer = http.post("/v1/fit", json={"config": config, "method": "lora", "gpu": "L4"}).json()
    assert answer["source"] == "the request"
    for name in expected.keys() - {"model", "source"}:
        assert json.dumps(answer[name]) == json.dumps(expected[name]), name


def test_no_name_reads_the_servers_files_or_asks_the_hub(
    http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(find_model(QWEN).config)))
    for name in (str(tmp_path), f"{tmp_path}/config.json", "/etc/passwd", "./x", "hf/internal"):
        assert refused_field(http, {"model": name}) == "model"
    (tmp_path / "gpu.json").write_text("{}")
    for gpu in (f"{tmp_path}/gpu.json", f"8x{tmp_path}/gpu.json", "/etc/passwd"):
        assert refused_field(http, {"model": QWEN, "gpu": gpu}) == "gpu"


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({}, "model"),
        ({"model": 3}, "model"),
        ({"model": "x" * 201}, "model"),
        ({"model": QWEN, "method": "lorra"}, "method"),
        ({"model": QWEN, "batch_size": 0}, "batch_size"),
        ({"model": QWEN, "batch_size": 10**400}, "batch_size"),
        ({"model": QWEN, "rank": 8}, "rank"),
        ({"model": QWEN, "library": "litgpt"}, "library"),
        ({"config": []}, "config"),
        ({"config": {"model_type": "perceptron"}}, "config"),
        ({"config": {"model_type": "layers", "layers": [["relu", 1, 0]] * 10_000}}, "config"),
        ({"config": {**find_model(QWEN).config, "head_dim": "128"}}, "config"),
        ({"config": {**find_model(QWEN).config, "hidden_size": 10**300}}, "config"),
    ],
)
def test_wrong_questions_are_refused_at_their_field(
    http: httpx.Client, question: Document, field: str
) -> None:
    assert refused_field(http, question) == field


def test_amounts_beyond_64_bits_are_answered(http: httpx.Client) -> None:
    question = {"model": QWEN, "sequence_length": 2**24, "batch_size": 2**20, "attention": "math"}
    answer = http.post("/v1/fit", json=question).raise_for_status().json()
    assert answer["expected_bytes"] > 2**64


def test_questions_that_arrive_together_are_answered_or_refused_for_a_while(
    http: httpx.Client,
) -> None:
    with ThreadPoolExecutor(16) as threads:
        together = threads.map(
            lambda length: http.post("/v1/fit", json={"model": QWEN, "sequence_length": length}),
            range(128, 128 * 33, 128),
        )
        statuses = [response.status_code for response in together]
    assert set(statuses) <= {200, 503}
    assert 200 in statuses


def test_names_are_found_by_their_words(http: httpx.Client) -> None:
    def found(text: str) -> list[str]:
        answer = http.get("/v1/fit/models", params={"search": text}).raise_for_status().json()
        return [each["name"] for each in answer["models"]]

    assert found("qwen3 8b")[0] == QWEN
    assert found("no such model") == []
    assert 0 < len(found("")) <= 20
    assert all("convnext" in name for name in found("convnext"))
    assert http.get("/v1/fit/models", params={"find": "qwen"}).status_code == 422
    assert http.get("/v1/fit/models", params={"search": "q" * 201}).status_code == 422
