"""``python -m research readings``: what ``fit`` says, beside published readings."""

import csv
import sys
from pathlib import Path

import pytest

from research.cli import main
from research.readings import TABLES, Reading, compare, readings

ROW = {
    "row_id": "litgpt:1",
    "model": "meta-llama/Llama-2-7b-hf",
    "method": "lora",
    "precision": "bf16",
    "batch_per_gpu": "2",
    "gradient_accumulation": "4",
    "sequence_length": "512",
    "checkpointing": "none",
    "attention": "sdpa",
    "gpus": "1",
    "gpu": "NVIDIA A10G 24GB",
    "usable": "yes",
    "reading_kind": "torch_max_allocated",
    "family": "llama2",
    "lora_rank": "32",
    "lora_targets": "query,value",
    "reading_bytes": "19770000000",
}


def test_a_reading_is_met_and_a_row_that_cannot_be_asked_says_why(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "row_id": "litgpt:2", "method": "adapter"}, {**ROW, "gpus": "2"}]
    for table in TABLES:
        with (tmp_path / f"{table}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROW))
            writer.writeheader()
            writer.writerows(rows if table == "litgpt" else [])
    met, left_out = list(readings(tmp_path))
    assert isinstance(met, Reading)
    assert abs(met.error) < 0.03
    assert left_out == "litgpt:2: method adapter"
    weights = 2 * 6_738_415_616 + 16 * 16_777_216  # rank 32 beside query and value of 32 blocks
    assert met.rules["weights and states"] == weights
    kept_by_a_block = 4_096 * 34 + 5 * 32 * 512  # bytes a token
    activations = 2 * 512 * 32 * kept_by_a_block
    assert met.rules["Transformer Math 101"] == weights + activations
    kept = tmp_path / "answers.jsonl"
    shown = compare(tmp_path, kept=kept)
    assert "litgpt: 1 rows" in shown
    assert "by factors from the other families: 0 of 1" in shown
    assert "| accelerate estimate-memory | 1 |" in shown
    assert "* litgpt:2" in shown
    assert len(kept.read_text().splitlines()) == 2
    kept.write_text(kept.read_text().replace("litgpt:2: method", "litgpt:2: kept: method"))
    assert "* litgpt:2: kept: method adapter" in compare(tmp_path, kept=kept)


@pytest.mark.nightly
def test_a_ladder_of_batches_agrees_with_a_trace_or_not(tmp_path: Path) -> None:
    row = {
        **ROW,
        "row_id": "timm:nchw:deit",
        "model": "deit_base_patch16_384",
        "family": "vis:deit",
        "layout": "nchw",
        "input_shape": "32x3x384x384",
        "fits_batch": "32",
        "fails_batch": "48",
    }
    rows = [
        row,
        row | {"row_id": "timm:low", "fails_batch": "36"},
        row | {"row_id": "timm:gone", "model": "no_such"},
    ]
    with (tmp_path / "timm.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows(rows)
    shown = compare(tmp_path, sources=["timm"], kept=tmp_path / "answers.jsonl")
    assert "| nchw | 2 | 50.0% | 0.0% | 50.0% | 0.0% | 50.0% |" in shown
    assert "* timm:gone: Unknown model (no_such)" in shown


def test_a_vision_row_that_cannot_be_built_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mmengine", None)
    rows = [ROW | {"row_id": "mmdet3d:1"}, ROW | {"row_id": "mmseg:1", "gpus": "4"}]
    with (tmp_path / "openmmlab.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    assert not main(["readings", str(tmp_path), "--source", "openmmlab"])
    shown = capsys.readouterr().out
    assert "* mmdet3d:1: mmdet3d needs compiled sparse convolutions" in shown
    assert "* mmseg:1: mmengine is not installed" in shown
