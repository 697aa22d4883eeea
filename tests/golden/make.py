"""Writes the golden answers: ``python -m tests.golden.make answers``, or ``traces``.

The jobs stand in ``jobs.json``, the questions in ``answers.json``: edit them there.  Run it only
when an answer is meant to change, and say in the commit why it does.  A renamed field
changes no answer: then the tables at the top of the tests change, and the files stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

import gpumemnet
from tests.conftest import running_service
from tests.golden import test_golden as ways

HERE = Path(__file__).parent
PREDICTOR = gpumemnet.Predictor.default()
MIB = 2**20
DIGITS = 5


def write_answers() -> None:
    jobs, bad_jobs = json.loads((HERE / "jobs.json").read_text()).values()
    old = json.loads((HERE / "answers.json").read_text())
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder) / "log") as service,
        httpx.Client(base_url=service.url, timeout=300) as http,
    ):
        answers = {
            "questions": [
                {
                    **one,
                    "answers": [_answer(http, jobs[name], one["question"]) for name in one["jobs"]],
                }
                for one in old["questions"]
            ],
            "/v1/batch-sizes": [
                _turned_round(http, jobs, one["job"], "/v1/batch-sizes", one["question"])
                for one in old["/v1/batch-sizes"]
            ],
            "problems": [_problem(http, job) for job in bad_jobs.values()],
            "refused_questions": [
                _refused(http, jobs["mlp"], one["question"]) for one in old["refused_questions"]
            ],
        }
    _write("answers.json", answers, 4)


def write_traces() -> None:
    from tests.golden.test_golden_traces import (
        CASES,
        traced,
    )  # refuses to load with another version of PyTorch

    _write("traces.json", {name: traced(name) for name in CASES}, 1)


def _answer(http: httpx.Client, job: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    estimate = PREDICTOR.predict(gpumemnet.job_from_dict(job), **ways.python_options(question))
    answer = ways.read(ways.PYTHON, estimate)
    probabilities = answer["probabilities"]
    answer["request_mib"] = -(-answer["expected_bytes"] // MIB)
    answer["limit_mib"] = None if answer["safe_bytes"] is None else -(-answer["safe_bytes"] // MIB)
    answer["bin_count"] = len(probabilities)
    answer["probabilities"] = {
        str(index): rounded
        for index, value in enumerate(probabilities)
        if (rounded := round(value, DIGITS))
    }
    if "fits" in question:
        found = ways.post(http, "/v1/predict", {"job": job, **question})
        answer["fits"] = [ways.read(ways.FIT, fit) for fit in found["fits"]]
    return answer


def _turned_round(
    http: httpx.Client, jobs: dict[str, Any], name: str, path: str, question: dict[str, Any]
) -> dict[str, Any]:
    answer = ways.read(ways.BATCH_SIZES, ways.post(http, path, {"job": jobs[name], **question}))
    return {"job": name, "question": question, "answer": answer}


def _problem(http: httpx.Client, job: Any) -> dict[str, Any]:
    problem = ways.read(ways.PROBLEM, ways.post(http, "/v1/predict", {"job": job}, 422))
    (error,) = problem["errors"]
    field = error["field"].removeprefix("job").removeprefix(".")
    return {
        "field": field,
        "message": error["message"],
        **{name: problem[name] for name in ("type", "title", "status")},
    }


def _refused(http: httpx.Client, job: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    problem = ways.post(http, "/v1/predict", {"job": job, **question}, 422)
    return {"question": question, "problem": ways.read(ways.PROBLEM, problem)}


def _write(name: str, document: dict[str, Any], levels: int) -> None:
    (HERE / name).write_text(_lines(document, levels) + "\n")


def _lines(value: Any, levels: int) -> str:
    """``value`` as JSON with a line for each of its members down to ``levels``, so that a change
    can be read."""
    if levels == 0 or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(member, levels - 1) for member in value) + "\n]"
    return (
        "{\n"
        + ",\n".join(
            f"{json.dumps(name)}: {_lines(member, levels - 1)}" for name, member in value.items()
        )
        + "\n}"
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"answers": write_answers, "traces": write_traces}[name]()
