"""What only a GPU can show: labels that hold the weights, repeat, do not depend on neighbours, and
an honest out-of-memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builder.measure.journal import read_journal
from dataset_builder.measure.nvml import visible_meters
from gpumemnet.errors import MeasurementError
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.site.implausible_rows import implausible_rows
from gpumemnet.units import MIB

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
TOLERANCE_BYTES = 2 * MIB

SMALL = """
family: mlp
memory: {from: 1 MiB, to: 8 GiB}
features:
  {shape: [uniform, residual], depth: {from: 1, to: 4}, width: {from: 64, to: 4096, scale: log}, input_width: 512,
   output_width: 100, activation: [relu, gelu], norm: [none, batch_norm, layer_norm], dropout: [0.0, 0.1]}
options:
  {batch_size: {from: 2, to: 4096, scale: log}, optimizer: [sgd, adam, adamw, adafactor], checkpointing: [none, every_block],
   precision: [fp32, tf32, amp_fp16, amp_bf16, bf16]}
"""
TOO_LARGE = """
family: mlp
memory: {from: 1 MiB, to: 999999 GiB}
features: {shape: uniform, depth: 8, width: 16384, input_width: 8, output_width: 2, activation: gelu, norm: none, dropout: 0.0}
options: {batch_size: 8000000}
"""


@pytest.fixture(autouse=True)
def gpu() -> None:
    try:
        visible_meters()
    except MeasurementError as error:
        pytest.skip(str(error))


def measured(folder: Path, recipe: str, jobs: int, *extra: object) -> list[Measurement]:
    """Run a campaign as a user would; its rows, ordered by job."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe)
    command = [
        sys.executable,
        "-m",
        "dataset_builder",
        "campaign",
        folder / "recipe.yaml",
        "--jobs",
        jobs,
    ]
    command += ["--out", folder / "c", *extra]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, timeout=500)
    rows = list(read_journal(folder / "c"))
    assert implausible_rows(rows) == []
    if rows[0].provenance == "measured":
        assert len(read_dataset(folder / "c" / "dataset.parquet")) == len(rows)
    return sorted(rows, key=lambda row: (row.architecture, row.options))


def test_labels_hold_the_weights_and_do_not_depend_on_neighbours_or_the_run(tmp_path: Path) -> None:
    crowd = measured(tmp_path / "crowd", SMALL, 16, "--workers", 6)
    alone = measured(tmp_path / "alone", SMALL, 16, "--workers", 1)
    assert {row.status for row in crowd + alone} == {"ok"}
    for one, other in zip(crowd, alone, strict=True):
        assert (one.job, one.options) == (other.job, other.options)
        assert one.provenance == visible_meters()[0].provenance  # "measured", but in a rehearsal
        assert one.label_bytes is not None
        assert other.label_bytes is not None
        assert one.startup_peak_bytes is not None
        assert one.label_state == "steady"
        assert abs(one.label_bytes - other.label_bytes) <= TOLERANCE_BYTES
        assert one.peak_reserved_bytes == other.peak_reserved_bytes
        assert (
            one.label_bytes
            >= (one.job.total_parameters or 0) * ELEMENT_BYTES[one.job.precision].weight
        )
        assert (
            one.startup_peak_bytes
            >= one.label_bytes
            > one.phases[-1].reserved_bytes
            >= one.phases[-1].allocated_bytes
            > 0
        )
        assert (one.context_bytes or 0) > 50 * MIB
        assert [phase.name for phase in one.phases[:6]] == [
            "context",
            "build",
            "forward",
            "backward",
            "step_1",
            "step_2",
        ]
        assert one.steps is not None
        assert 3 <= one.steps <= 10


def test_a_job_that_does_not_fit_is_an_oom_with_the_capacity(tmp_path: Path) -> None:
    [row] = measured(tmp_path / "oom", TOO_LARGE, 1)
    assert row.status == "oom"
    assert row.label_bytes is None
    assert row.neighbours == 0
    assert 0 < row.capacity_bytes <= visible_meters()[0].gpu.total_bytes
    assert row.reason
