"""Writes the golden answers: ``python -m tests.golden.make answers``, or ``traces``.

Run it only when an answer is meant to change, and say in the commit why it does.  A renamed field
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
from tests.golden.golden_jobs import golden_bad_jobs, golden_jobs

HERE = Path(__file__).parent
PREDICTOR = gpumemnet.Predictor.default()
MIB = 2**20
DIGITS = 5
QUESTIONS: list[dict[str, Any]] = [
    {},
    {"bin_width_mib": 8192},
    {"gpu": "H100"},
    {"gpu": "RTX 4090", "coverage": 0.95},
    {"coverage": 0.9},
    {"encoder": "transformer"},
    {"encoder": "common"},
    {"bin_width_mib": 2048},
    {
        "bins": "published-8000mib",
        "fits": ["T4", "A100", "A100/3g.20gb", "H200"],
        "devices": [
            {"id": "GPU-0", "gpu": "A100", "free_mib": 2000},
            {"id": "GPU-1", "gpu": "H100", "mig": "1g.10gb"},
        ],
    },
]
"""The first is asked of all jobs, the others of every fifth."""
REFUSED: list[dict[str, Any]] = [
    *(
        {"coverage": 2},
        {"coverage": "high"},
        {"covrage": 0.9},
        {"gpu": "Voodoo 2"},
        {"encoder": "rnn"},
    ),
    *(
        {"bins": "published-3mib"},
        {"bin_width_mib": 1},
        {"bins": "published-1000mib", "bin_width_mib": 1024},
    ),
    *({"fits": ["T4", "Z80"]}, {"devices": [{"id": "0", "gpu": "A100", "mig": "9g.1gb"}]}),
]
TURNED_ROUND = (
    *(
        "mlp",
        "mlp totals",
        "mlp replicas",
        "mlp traced",
        "cnn",
        "cnn checkpointing",
        "cnn amp_fp16",
        "transformer",
    ),
    *(
        "transformer bf16",
        "transformer totals",
        "transformer cudnn",
        "example",
        "published_transformer_a100 160",
    ),
)


def write_answers() -> None:
    jobs, bad_jobs = golden_jobs(), golden_bad_jobs()
    _write("jobs.json", {"jobs": jobs, "bad_jobs": bad_jobs}, 2)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder) / "log") as service,
        httpx.Client(base_url=service.url, timeout=300) as http,
    ):
        answers = {
            "questions": [
                _asked(http, jobs, question, 5 if at else 1)
                for at, question in enumerate(QUESTIONS)
            ],
            "/v1/batch-sizes": [
                _turned_round(http, jobs, name, "/v1/batch-sizes", question)
                for name in TURNED_ROUND
                for question in (
                    {"max_batch": 256},
                    {"max_batch": 64, "gpu": "A100/1g.5gb", "coverage": 0.9},
                )
            ],
            "problems": [_problem(http, job) for job in bad_jobs.values()],
            "refused_questions": [_refused(http, jobs["mlp"], question) for question in REFUSED],
        }
    _write("answers.json", answers, 4)


def write_traces() -> None:
    from tests.golden.test_golden_traces import (
        CASES,
        traced,
    )  # refuses to load with another version of PyTorch

    _write("traces.json", {name: traced(name) for name in CASES}, 1)


def _asked(
    http: httpx.Client, jobs: dict[str, Any], question: dict[str, Any], step: int
) -> dict[str, Any]:
    names = [
        name
        for name in list(jobs)[::step]
        if question.get("encoder") != "transformer" or "layers" in jobs[name]
    ]
    return {
        "question": question,
        "jobs": names,
        "answers": [_answer(http, jobs[name], question) for name in names],
    }


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
