"""Golden answers: what every way of asking said of the jobs in ``jobs.json`` when ``answers.json``
was written by ``make.py``.

Reasons, bins and names must be equal.  Processors round differently, so amounts may differ from the
frozen ones by a millionth, and probabilities by 0.00001, which nobody acts on; smaller ones are not
written down.  In the same run every way of asking gives the same amounts, and probabilities to 12
digits, but for the transformer-based encoder (see ``ROUNDING``).
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gpumemnet

HERE = Path(__file__).parent
MIB = 2**20

Table = Mapping[str, str | Callable[[Any], Any]]
"""The name of each golden quantity in one way of asking: a dotted path, or a function where the
value is written differently."""


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


PYTHON: Table = {
    **same(
        "expected_bytes",
        "startup_peak_bytes",
        "safe_bytes",
        "in_support",
        "bin_index",
        "probabilities",
        "coverage",
        "gpu",
    ),
    "label_source": "label_source",
    "reasons": lambda estimate: list(estimate.reasons),
    "bin_lower_bytes": lambda estimate: estimate.bins.bounds_bytes(estimate.bin_index)[0],
    "bin_upper_bytes": lambda estimate: estimate.bins.bounds_bytes(estimate.bin_index)[1],
    "model": "estimator",
}
HTTP: Table = {
    **same("expected_bytes", "startup_peak_bytes", "safe_bytes"),
    **same("in_support", "reasons", "coverage", "gpu", "label_source"),
    "bin_index": "bin.index",
    "bin_lower_bytes": "bin.lower_bytes",
    "bin_upper_bytes": "bin.upper_bytes",
    "probabilities": "bins.probabilities",
    "model": "model.name",
}
COMMAND: Table = HTTP
FILES: Table = {
    **same("request_mib", "limit_mib", "startup_peak_bytes", "gpu", "model"),
    "reason": lambda row: row["reasons"] or "",
    **same("in_support", "bin_index", "bin_lower_bytes", "bin_upper_bytes"),
}
LAYER = ("kind", "activations", "parameters")
TEXT = same("limit_mib", "request_mib", "safe_bytes", "expected_bytes")
FIT = same(
    "gpu", "mig", "device", "available_mib", "request_mib", "limit_mib", "verdict", "probability"
)
BATCH_SIZES: Table = {
    **same(
        "gpu",
        "mig",
        "available_mib",
        "coverage",
        "max_batch",
        "safe_batch",
        "likely_batch",
        "reasons",
    ),
    "curve": lambda answer: [
        [point["batch_size"], point["request_mib"], point["limit_mib"]] for point in answer["curve"]
    ],
}
PROBLEM = same("type", "title", "status", "detail", "errors")
REJECTED = {"field": "field", "message": "reason"}

AMOUNTS = ("expected_bytes", "startup_peak_bytes", "safe_bytes", "request_mib", "limit_mib")
FROZEN, SAME_RUN = 1e-5, 1e-12
"""Largest difference of probabilities."""
FROZEN_AMOUNTS = 1e-6
"""Relative; amounts in MiB may be one apart, where rounding up crosses a whole number."""
ROUNDING = 2e-5
"""Relative, of amounts, and absolute, of probabilities: the transformer-based encoder sums in
float32, and in an order that changes with the jobs that are asked together."""


def read(table: Table, answer: Any) -> dict[str, Any]:
    """``answer`` by golden names."""
    return {
        name: place(answer) if callable(place) else _at(answer, place)
        for name, place in table.items()
    }


def _at(thing: Any, path: str) -> Any:
    for name in path.split("."):
        thing = thing[name] if isinstance(thing, Mapping) else getattr(thing, name)
    return thing


def loaded(name: str) -> Any:
    return json.loads((HERE / name).read_text())


JOBS: dict[str, Any] = loaded("jobs.json")["jobs"]
BAD_JOBS: dict[str, Any] = loaded("jobs.json")["bad_jobs"]
GOLDEN: dict[str, Any] = loaded("answers.json")
DEFAULT, *VARIANTS = GOLDEN["questions"]


def python_options(question: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a question over HTTP as the arguments of a predictor."""
    options = {
        name: value for name, value in question.items() if name in ("coverage", "gpu", "encoder")
    }
    if "bin_width_mib" in question:
        options["bins"] = gpumemnet.bins_of_width(question["bin_width_mib"] * MIB)
    return options


def rounds(question: Mapping[str, Any]) -> bool:
    """Whether the answers depend a little on what is asked together."""
    return question.get("encoder") == "transformer"


def check(
    found: Mapping[str, Any], golden: Mapping[str, Any], near: float, rounded: bool = False
) -> None:
    """What was ``found`` is what is frozen or was answered before, but for probabilities, which are
    ``near``."""
    wanted = {name: golden[name] for name in found}
    if rounded or near == FROZEN:
        amounts = [name for name in found if name in AMOUNTS and golden[name] is not None]
        part = ROUNDING if rounded else FROZEN_AMOUNTS
        wanted |= {name: pytest.approx(golden[name], rel=part, abs=1) for name in amounts}
    if "probabilities" in found:
        found = {**found, "probabilities": list(found["probabilities"])}
        wanted["probabilities"] = pytest.approx(
            list(golden["probabilities"]), rel=0, abs=ROUNDING if rounded else near
        )
    assert found == wanted


def frozen(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer of ``answers.json`` with all its probabilities, and its reasons as one text,
    too."""
    likely = answer["probabilities"]
    probabilities = [likely.get(str(index), 0.0) for index in range(answer["bin_count"])]
    return {**answer, "probabilities": probabilities, "reason": "; ".join(answer["reasons"])}


Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def predictor() -> gpumemnet.Predictor:
    return gpumemnet.Predictor.default()


@pytest.fixture(scope="module")
def answers(predictor: gpumemnet.Predictor) -> Answers:
    """The default question in process, one job at a time; what Python does not state (MiB, one text
    of the reasons) is frozen."""
    return [
        frozen(golden) | read(PYTHON, predictor.predict(gpumemnet.job_from_dict(job)))
        for job, golden in zip(JOBS.values(), DEFAULT["answers"], strict=True)
    ]


@pytest.fixture(scope="module")
def http(service: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=300) as client:
        yield client


def post(http: httpx.Client, path: str, body: Any, status: int = 200, **headers: str) -> Any:
    response = http.post(path, json=body, headers=headers)
    assert response.status_code == status, response.text
    return response.text if "accept" in headers and status == 200 else response.json()


@pytest.mark.parametrize("asked", GOLDEN["questions"], ids=lambda asked: str(asked["question"]))
def test_python_many_in_one_call(predictor: gpumemnet.Predictor, asked: dict[str, Any]) -> None:
    options = python_options(asked["question"])
    jobs = [gpumemnet.job_from_dict(JOBS[name]) for name in asked["jobs"]]
    together = predictor.predict_many(jobs, **options)
    for job, estimate, golden in zip(jobs, together, asked["answers"], strict=True):
        alone = read(PYTHON, predictor.predict(job, **options))
        check(alone, frozen(golden), FROZEN)
        check(read(PYTHON, estimate), alone, SAME_RUN, rounds(asked["question"]))


@pytest.mark.parametrize("at_once", [1, 32])
def test_http(http: httpx.Client, answers: Answers, at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as threads:
        found = threads.map(lambda job: post(http, "/v1/predict", {"job": job}), JOBS.values())
        for one, answer in zip(found, answers, strict=True):
            check(read(HTTP, one), answer, SAME_RUN)


def test_http_batch(http: httpx.Client, answers: Answers) -> None:
    found = post(http, "/v1/predict/batch", {"jobs": list(JOBS.values())})
    assert found["failed"] == 0
    for result, answer in zip(found["results"], answers, strict=True):
        check(read(HTTP, result["prediction"]), answer, SAME_RUN)


@pytest.mark.parametrize("asked", VARIANTS, ids=lambda asked: str(asked["question"]))
def test_http_with_options(http: httpx.Client, asked: dict[str, Any]) -> None:
    question, jobs = asked["question"], [JOBS[name] for name in asked["jobs"]]
    single = [post(http, "/v1/predict", {"job": job, **question}) for job in jobs]
    batch = post(http, "/v1/predict/batch", {"jobs": jobs, **question})["results"]
    for document, result, golden in zip(single, batch, asked["answers"], strict=True):
        for found, is_batch in ((document, False), (result["prediction"], True)):
            check(read(HTTP, found), frozen(golden), FROZEN, is_batch and rounds(question))
            check_fits(found.get("fits", []), golden.get("fits", []))


def check_fits(found: list[Any], golden: list[Any]) -> None:
    for fit, one in zip(found, golden, strict=True):
        assert read(FIT, fit) == one | {
            "probability": pytest.approx(one["probability"], rel=0, abs=FROZEN)
        }


def test_text(http: httpx.Client, answers: Answers) -> None:
    for job, answer in zip(JOBS.values(), answers, strict=True):
        names = [name for name in TEXT if answer[name] is not None]
        path = f"/v1/predict?field={','.join(TEXT[name] for name in names)}"
        words = post(http, path, {"job": job}, accept="text/plain").split()
        assert words == [str(answer[name]) for name in names]
        if answer["limit_mib"] is None:
            problem = post(http, "/v1/predict", {"job": job}, 422, accept="text/plain")
            assert (problem["type"], problem["detail"]) == (
                "urn:gpumemnet:problem:outside-support",
                f"there is no {TEXT['limit_mib']}: {'; '.join(answer['reasons'])}",
            )
        else:
            assert (
                post(http, "/v1/predict", {"job": job}, accept="text/plain")
                == f"{answer['limit_mib']}\n"
            )


def test_largest_batch(http: httpx.Client) -> None:
    path = "/v1/batch-sizes"
    for asked in GOLDEN[path]:
        found = read(
            BATCH_SIZES, post(http, path, {"job": JOBS[asked["job"]], **asked["question"]})
        )
        assert found == asked["answer"]


def command(*arguments: str | Path) -> str:
    """What ``gpumemnet predict`` prints."""
    words = [sys.executable, "-m", "gpumemnet", "predict", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_lines(path: Path, documents: list[Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_command_line(tmp_path: Path, answers: Answers) -> None:
    jobs = write_lines(tmp_path / "jobs.jsonl", list(JOBS.values()))
    lines = command(jobs, "--json").splitlines()
    for line, answer in zip(lines, answers, strict=True):
        check(read(COMMAND, json.loads(line)), answer, SAME_RUN)


def named() -> list[dict[str, Any]]:
    """The jobs with their names as ids, the layers as objects everywhere, as columns of a table
    have one type."""
    rows = []
    for name, job in JOBS.items():
        layers = [
            {"parameters": 0, **one}
            if isinstance(one, dict)
            else dict(zip(LAYER, one, strict=True))
            for one in job.get("layers", ())
        ]
        rows.append({"job_id": name, **job, **({"layers": layers} if layers else {})})
    return rows


def check_rows(rows: list[dict[str, Any]], answers: Answers) -> None:
    assert [row["job_id"] for row in rows] == list(JOBS)
    for row, answer in zip(rows, answers, strict=True):
        check(read(FILES, row), answer, SAME_RUN)


def test_json_lines_to_parquet_and_rows_that_are_no_jobs(tmp_path: Path, answers: Answers) -> None:
    lines = [{"job_id": name, **job} for name, job in JOBS.items()]
    jobs = write_lines(tmp_path / "jobs.jsonl", [*lines, *BAD_JOBS.values()])
    command(jobs, "--out", tmp_path / "answers.parquet", "--workers", "1")
    check_rows(pq.read_table(tmp_path / "answers.parquet").to_pylist(), answers)
    rejected = [
        json.loads(line) for line in (tmp_path / "answers.rejected.jsonl").read_text().splitlines()
    ]
    assert [read(REJECTED, row) for row in rejected] == [
        {name: problem[name] for name in REJECTED} for problem in GOLDEN["problems"]
    ]


def test_csv_to_json_lines(tmp_path: Path, answers: Answers) -> None:
    rows = [
        row | {"layers": json.dumps(row["layers"]) if "layers" in row else ""} for row in named()
    ]
    with (tmp_path / "jobs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    command(tmp_path / "jobs.csv", "--out", tmp_path / "answers.jsonl", "--workers", "1")
    check_rows(
        [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()],
        answers,
    )


def test_parquet_to_csv(tmp_path: Path, answers: Answers) -> None:
    rows = named()
    columns = {
        name: [row.get(name) for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row)
    }
    pq.write_table(pa.table(columns), tmp_path / "jobs.parquet")
    command(tmp_path / "jobs.parquet", "--out", tmp_path / "answers.csv", "--workers", "1")
    with (tmp_path / "answers.csv").open(newline="") as file:
        check_rows(
            [
                {name: _parsed(name, value) for name, value in row.items()}
                for row in csv.DictReader(file)
            ],
            answers,
        )


def _parsed(name: str, value: str) -> Any:
    if value == "":
        return None
    return (
        json.loads(value)
        if value in ("true", "false") or name.endswith(("_mib", "_bytes")) or name == "bin_index"
        else value
    )


def problem_at(place: str, problem: Mapping[str, Any]) -> dict[str, Any]:
    """The frozen problem of a job that stands in a request at ``place``."""
    field = f"{place}.{problem['field']}" if problem["field"] else place
    return {
        **{name: problem[name] for name in ("type", "title", "status")},
        "detail": f"{field}: {problem['message']}",
        "errors": [{"field": field, "message": problem["message"]}],
    }


@pytest.mark.parametrize("number", range(len(BAD_JOBS)), ids=list(BAD_JOBS))
def test_a_bad_job_alone(http: httpx.Client, number: int) -> None:
    job, golden = list(BAD_JOBS.values())[number], GOLDEN["problems"][number]
    assert read(PROBLEM, post(http, "/v1/predict", {"job": job}, 422)) == problem_at("job", golden)
    with pytest.raises(gpumemnet.GpumemnetError) as raised:
        gpumemnet.job_from_dict(job)
    assert str(raised.value) == f"{golden['field']}: {golden['message']}".removeprefix(": ")


def test_bad_jobs_among_good_ones(http: httpx.Client, answers: Answers) -> None:
    good = list(JOBS.values())[: len(BAD_JOBS)]
    mixed = [job for pair in zip(good, BAD_JOBS.values(), strict=True) for job in pair]
    found = post(http, "/v1/predict/batch", {"jobs": mixed})
    assert found["failed"] == len(BAD_JOBS)
    for number, golden in enumerate(GOLDEN["problems"]):
        check(read(HTTP, found["results"][2 * number]["prediction"]), answers[number], SAME_RUN)
        problem = found["results"][2 * number + 1]["problem"]
        assert read(PROBLEM, problem) == problem_at(f"jobs[{2 * number + 1}]", golden)


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/predict/batch"])
def test_a_question_that_cannot_be_asked(http: httpx.Client, path: str) -> None:
    content = {"job": JOBS["mlp"]} if path == "/v1/predict" else {"jobs": [JOBS["mlp"]]}
    for refused in GOLDEN["refused_questions"]:
        assert (
            read(PROBLEM, post(http, path, content | refused["question"], 422))
            == refused["problem"]
        )
