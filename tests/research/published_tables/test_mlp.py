"""The published table: true rows come through unchanged, and a bad row is named by its line."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from dataset_builder.families import family, parse_architecture
from gpumemnet.job.dataset import read_dataset
from gpumemnet.units import MIB
from research.published_tables.importing import import_published, read_published

HEADER = (
    "Filename,Depth,Activations-Params,Activation Function,Total Activations,Total Parameters,Batch Size,"
    "Batch Normalization Layers,Dropout Layers,Max GPU Memory (MiB),Avg GPUTL\n"
)
NAME = "input:3_output:2_depth:1_arch:uniform_batch:8_act:swish_dropout:0.25_dropout:True_batchnorm:True.out"
LAYERS = "[('linear', 4, 16), ('batch_normalization', 4, 8), ('SiLU', 4, 0), ('dropout', 4, 0), ('linear', 2, 10), ('Softmax', 2, 0)]"
GOOD = f'{NAME},2,"{LAYERS}",SiLU,20,34,8,1,1,1500,1.0\n'


def table(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text)
    return path


def test_a_row_becomes_a_measurement(tmp_path: Path) -> None:
    [row] = read_published(table(tmp_path, HEADER + GOOD))
    assert [layer.kind for layer in row.job.layers] == [
        "linear",
        "batch_norm1d",
        "silu",
        "dropout",
        "linear",
        "softmax",
    ]
    assert (row.job.batch_size, row.job.input_elements, row.job.total_parameters) == (8, 3, 34)
    assert (row.job.optimizer, row.job.precision, row.job.activation_function) == (
        "adam",
        "fp32",
        "silu",
    )
    assert row.label_bytes == row.peak_device_bytes == 1500 * MIB
    assert (row.provenance, row.label_source, row.gpu) == (
        "published",
        "nvidia_smi_device_1s",
        "NVIDIA A100-SXM4-40GB",
    )
    assert (row.peak_process_bytes, row.context_bytes, row.torch, row.driver) == (
        None,
        None,
        None,
        None,
    )
    architecture = json.loads(row.architecture)
    assert (architecture["shape"], architecture["hidden_widths"], architecture["dropout"]) == (
        "uniform",
        [4],
        0.25,
    )
    network = family("mlp").build(parse_architecture("mlp", json.loads(row.architecture)))
    assert sum(each.numel() for each in network.parameters()) == 34


def test_the_published_table(tmp_path: Path, published_csv: Path) -> None:
    out = tmp_path / "p.parquet"
    assert import_published(published_csv, out) == 3_000
    first = out.read_bytes()
    assert import_published(published_csv, out) == 3_000
    assert out.read_bytes() == first, "importing twice gives the same file"
    rows = read_dataset(out)
    labels = [(row.label_bytes or 0) / MIB for row in rows]
    assert (min(labels), statistics.median(labels), max(labels)) == (1_443, 1_576, 4_925)
    assert len({row.architecture_key for row in rows}) == 3_000
