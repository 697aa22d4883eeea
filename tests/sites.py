"""Simulated sites: the published readings of MLPs as if another driver, of another context, had
taken them."""

from __future__ import annotations

import io
import os
import random
import subprocess
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from gpumemnet.cli import main
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import MIB

DATASETS = Path(__file__).parents[1] / "dataset_builder" / "datasets"
A100 = "NVIDIA A100-SXM4-40GB"


@cache
def published(family: str = "mlp") -> tuple[Measurement, ...]:
    return tuple(read_dataset(DATASETS / f"published_{family}_a100.parquet"))


def site_rows(
    count: int, *, shift_mib: int = -600, seed: int = 0, family: str = "mlp", **changes: Any
) -> list[Measurement]:
    """``count`` published rows whose labels are moved by ``shift_mib``; ``changes`` replace
    fields."""
    drawn = random.Random(seed).sample(published(family), count)
    return [moved(row, shift_mib, **changes) for row in drawn]


def moved(row: Measurement, shift_mib: int, **changes: Any) -> Measurement:
    peak = row.peak_device_bytes
    return replace(
        row, **{"peak_device_bytes": None if peak is None else peak + shift_mib * MIB, **changes}
    )


def probes(count: int, context_mib: int = 824) -> list[Measurement]:
    """Rows as ``dataset_builder`` measures them on a GPU: with the context read."""
    rows = site_rows(count, shift_mib=context_mib - 1429)
    changes: dict[str, Any] = {
        "provenance": "measured",
        "label_source": "nvml_process",
        "peak_device_bytes": None,
    }
    return [
        replace(
            row,
            **changes,
            peak_process_bytes=row.peak_device_bytes,
            context_bytes=(context_mib + number % 3) * MIB,
        )
        for number, row in enumerate(rows)
    ]


def write_rows(path: Path, rows: Sequence[Measurement]) -> Path:
    write_dataset(path, rows)
    return path


def gpumemnet(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command line in this process, with no settings in the environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")}
    printed, said = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {**clean, "COLUMNS": "120"}, clear=True),
        redirect_stdout(printed),
        redirect_stderr(said),
    ):
        code = main([*map(str, arguments)])
    return subprocess.CompletedProcess([], code, printed.getvalue(), said.getvalue())
