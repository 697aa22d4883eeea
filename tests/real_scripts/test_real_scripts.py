"""What people write in training scripts: one idiom a file, with figures that follow from its sizes
by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gpumemnet.tracing import script_child

HERE = Path(__file__).parent
LIBRARIES = HERE.parents[1] / "benchmarks" / "real_scripts_libraries"


def linear(*widths: int) -> int:
    """Bytes of a chain of layers in fp32, biases included."""
    return 4 * sum(before * after + after for before, after in pairwise(widths))


class Case(NamedTuple):
    """What the answer must say.

    Attributes:
        parts: bytes at the peak by class, by hand count.
        batch_size: samples.
        note: a part of one of the notes.
    """

    parts: Mapping[str, int]
    batch_size: int
    note: str = ""


COPIES, SMALL = linear(512, 512, 512), linear(256, 256, 256)
LAYERS = linear(256, 256, 10)
HALF = 2 * (256 * 16 * 9 + 256 + 2 * 256 + 256 * 256 * 9 + 256)
PACKED = linear(64, 256, 8) + 4 * (3 * 16 * (8 + 16) + 2 * 3 * 16)
BIASES = linear(32, 32) + 4 * 4 * 49
MUON, MATRICES = linear(256, 1024, 256), 2 * 4 * 256 * 1024

NO_OPTIMIZER = "no optimizer was found"

CASES = {
    "any_accelerator": Case(
        {"parameter": LAYERS, "optimizer_state": 2 * LAYERS}, 100, "what Inductor's own plan saves"
    ),
    "allocator_in_script": Case(  # fragmentation as with --allocator-conf and without the line
        {"parameter": linear(256, 256, 256), "fragmentation": 25_389_048},
        4000,
        "the script sets PYTORCH_ALLOC_CONF to expandable_segments:True",
    ),
    "branch_on_loss": Case(
        {"parameter": linear(256, 256)},
        64,
        "both ways were traced, and this is the larger one",
    ),
    "counted_classes": Case(  # rows of 32 numbers, and counts of the pairs of ten classes
        {"parameter": linear(64, 64) + 4 * 4 * 64 * 32, "input": 256 * (4 * 64 + 8)},
        256,
        "aten.bincount was taken to find values below 100",
    ),
    "ctc_loss": Case(
        {
            "parameter": linear(64, 100),
            "optimizer_state": 2 * linear(64, 100),
            "input": 4 * 50 * 16 * 64,
        },
        50,
    ),
    "data_parallel": Case({"parameter": LAYERS, "gradient": LAYERS, "optimizer_state": LAYERS}, 64),
    "default_device": Case(
        {
            "parameter": linear(256, 256),
            "optimizer_state": 2 * linear(256, 256),
            "buffer": 0,
            "input": 4 * (256 * 256 + 32 * 256),
        },
        32,
    ),
    "ema_copies": Case(
        {"parameter": COPIES, "buffer": COPIES + 8, "optimizer_state": 2 * COPIES}, 16
    ),
    "gradients_by_hand": Case(  # those of the step before are still there
        {
            "parameter": linear(256, 512, 10),
            "gradient": 2 * linear(256, 512, 10),
            "optimizer_state": 0,
        },
        128,
        NO_OPTIMIZER,
    ),
    "graph_network": Case(  # features, edges, labels and the mask
        {
            "parameter": linear(128, 64) + linear(64, 7),
            "optimizer_state": 2 * (linear(128, 64) + linear(64, 7)),
            "input": 4 * 2000 * 128 + 8 * (2 * 10_000 + 2000) + 2000,
        },
        2000,
    ),
    "gpu_by_type": Case(  # the steps, and a learning rate
        {"parameter": linear(256, 512, 10), "optimizer_state": 2 * linear(256, 512, 10) + 4 * 4},
        64,
    ),
    "gpu_masks": Case(  # the wide layer does not run
        {
            "parameter": 4 * 1000 * 512 + linear(512, 512) + linear(512, 65536),
            "gradient": 4 * 1000 * 512 + linear(512, 512),
            "input": 8 * (4 + 4 * 64),
        },
        4,
    ),
    "half_channels_last": Case({"parameter": HALF, "optimizer_state": HALF}, 8),
    "lbfgs": Case(  # eleven updates of two vectors, the direction, the last gradient
        {"parameter": SMALL, "optimizer_state": 23 * SMALL + 21 * 4},
        8,
        "LBFGS: its history is counted in full",
    ),
    "many_evaluations": Case({"parameter": 20 * linear(256, 256), "optimizer_state": 0}, 64),
    "muon": Case({"parameter": MUON, "optimizer_state": MATRICES + 2 * (MUON - MATRICES)}, 64),
    "packed_lengths": Case(
        {"parameter": PACKED, "saved_activation": 4 * 680 * (64 + 256) + 2 * 4}, 16
    ),  # 680 steps, not 800
    "relative_bias": Case({"parameter": BIASES, "optimizer_state": 2 * BIASES}, 16),
    "one_step": Case(
        {"parameter": linear(1024, 1024), "gradient": 4 * 1024**2},
        32,
        "the script ended after 1 optimizer step",
    ),
    "policy": Case({"parameter": linear(4, 64, 1), "optimizer_state": 2 * linear(4, 64, 1)}, 32),
    "prefetching_thread": Case({"parameter": linear(512, 512), "input": 3 * 4 * 2048 * 512}, 2048),
    "resumed": Case(
        {"parameter": linear(512, 512), "optimizer_state": 2 * linear(512, 512), "input": 0}, 16
    ),
    "saved_on_host": Case(  # the output of each layer and the square are on the host or recomputed
        {"parameter": 4 * linear(512, 512), "input": 0},
        1024,
        "torch.jit.trace was left out",
    ),
    "selected_rows": Case(  # half of the rows that the mask selects, and what is selected from
        {
            "parameter": linear(256, 256),
            "saved_activation": 4 * 4096 * 256 + 4 * 2048 * 256 + 2 * 4,
        },
        4096,
        "half of them are expected, and the safe bytes hold all",
    ),
    "sequence_first": Case({"parameter": 4 * (2 * 100 * 64 + 100 + 2 * 4 * 64 * 65)}, 20),
    "sparse_graph": Case(  # features and labels; the matrix in COO, and in CSR
        {
            "parameter": linear(64, 128, 8),
            "optimizer_state": 2 * linear(64, 128, 8),
            "input": 4 * 1000 * 64 + 8 * 1000 + (2 * 8 + 4) * 5000 + 8 * 1001 + (8 + 4) * 1000,
            "saved_activation": 4 * 1000 * 128 + 4,
        },
        1000,
    ),
    "sparse_rows": Case(
        {
            "parameter": 4 * 10_000 * 64 + linear(64, 10),
            "optimizer_state": 2 * (4 * 10_000 * 64 + linear(64, 10)),
        },
        128,
    ),
    "sparse_on_host": Case(
        {
            "parameter": linear(256, 256),
            "optimizer_state": 2 * linear(256, 256),
            "input": 4 * 64 * 256,
        },
        64,
    ),
    "step_in_closure": Case(
        {"parameter": linear(64, 512, 512, 8), "saved_activation": 4 * 1024 * 512 + 2 * 4}, 1024
    ),
    "without_module": Case(
        {
            "parameter": 3 * 4 * 512**2,
            "gradient": 3 * 4 * 512**2,
            "optimizer_state": 2 * 3 * 4 * 512**2,
        },
        1,
        "the batch size is not known",
    ),
    "without_optimizer": Case(
        {"parameter": 4 * 512 * 266, "gradient": 4 * 512 * 266, "optimizer_state": 0},
        1,
        NO_OPTIMIZER,
    ),
    "validation_after_epoch": Case(
        {"parameter": linear(*5 * (256,)), "saved_activation": 2 * 4 * 4096 * 256 * 4 + 3 * 4},
        4096,
        "the peak is not in the first steps",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_script(name: str) -> None:
    answer, case = script_child.traced(HERE / f"{name}.py"), CASES[name]
    assert isinstance(answer, dict), answer
    assert {part: answer["parts"][part] for part in case.parts} == case.parts
    assert answer["batch_size"] == case.batch_size
    assert case.note in " ".join(answer["notes"])


def test_data_parallel_on_four_gpus() -> None:
    answer = script_child.traced(HERE / "data_parallel.py", (), 4)
    assert {
        part: answer["parts"][part] for part in ("parameter", "gradient", "optimizer_state")
    } == dict.fromkeys(("parameter", "gradient", "optimizer_state"), LAYERS)
    assert answer["batch_size"] == 64
    assert "DataParallel: the first of 4 GPUs" in " ".join(answer["notes"])


def test_every_script_is_run() -> None:
    assert {path.stem for path in HERE.glob("*.py")} == {*CASES, Path(__file__).stem}


def test_the_list_names_scripts_that_exist() -> None:
    document = tomllib.loads((HERE / "cases.toml").read_text())
    cases, commits = document["case"], document["commits"]
    assert len(cases) >= 60
    assert len({case["name"] for case in cases}) == len(cases)
    for case in cases:
        assert case["repository"] in commits or any(
            (folder / case["path"]).exists() for folder in (HERE, LIBRARIES)
        ), case["name"]
    assert {path.name for path in LIBRARIES.iterdir()} <= {case["path"] for case in cases} | {
        "__pycache__"
    }
