"""Files of jobs for the tests of batches, and the command line as a person runs it."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gpumemnet.cli import main

COMMAND = [sys.executable, "-m", "gpumemnet", "predict"]


def run(*arguments: str | Path, **environment: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **environment,
    )


def refused(*arguments: str | Path) -> str:
    """The one sentence with which the command line refuses; in this process, as starting another
    takes a second."""
    output, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(said):
        code = main(["predict", *map(str, arguments)])
    assert code == 2, said.getvalue()
    assert output.getvalue() == ""
    assert said.getvalue().startswith("error: ")
    assert said.getvalue().count("\n") == 1, said.getvalue()
    return said.getvalue()


def totals(count: int, seed: int = 0) -> pa.Table:
    """Jobs with totals only, of all families; half of the MLPs within what the A100 model knows."""
    generator = np.random.default_rng(seed)

    def words(*choices: str) -> pa.Array:
        return pa.array(np.array(choices)[generator.integers(0, len(choices), count)])

    return pa.table(
        {
            "job_id": pa.array([f"job-{number}" for number in range(count)]),
            "family": words("mlp", "mlp", "cnn", "transformer"),
            "batch_size": pa.array(generator.integers(4, 1000, count)),
            "input_elements": pa.array(generator.integers(64, 4096, count)),
            "optimizer": words("adam", "adamw"),
            "precision": words("fp32", "amp_bf16"),
            "attention_kernel": pa.nulls(count, pa.string()),
            "total_activations": pa.array(generator.integers(500, 10**6, count)),
            "total_parameters": pa.array(generator.integers(10**5, 10**8, count)),
        }
    )


def write(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, **options)
    return path


def write_lines(path: Path, documents: list[Any]) -> Path:
    path.write_text(
        "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in documents)
    )
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def rejected(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
