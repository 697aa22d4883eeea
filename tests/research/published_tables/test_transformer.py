"""Published transformers: the rebuilt network is what it is said to be, and a row comes through or
is named by what is wrong."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.extract import ExtractOptions, extract_job
from gpumemnet.units import MIB
from research.published_tables.transformer import (
    COLUMNS,
    PublishedTransformer,
    build,
    describe_network,
    measurement_of_row,
    parse,
)

NAME = (
    "num_classes:5_embedding_size:16_num_layers:2_num_heads:4_ff_hidden_size:37_dropout_rate:0.25"
    "_seq_length:7_input_size:60_num_samples:11_batch_size:3.out"
)
HEADER = ",".join(COLUMNS)
GOOD = f"{NAME},3,7,16,2,4,4063,3647,1500,SUCCESSFUL"
OOM = f"{NAME},3,7,16,2,4,4063,3647,40001,OOM_CRASH"
EARLY_OOM = f"{NAME},3,7,16,2,4,4063,0,39001,OOM_CRASH"
TINY = PublishedTransformer(
    num_classes=5,
    embedding_size=16,
    num_layers=2,
    num_heads=4,
    ff_hidden_size=37,
    dropout_rate=0.25,
    seq_length=7,
    input_size=60,
    num_samples=11,
    batch_size=3,
)


def row(line: str) -> dict[str, str | None]:
    [read] = csv.DictReader(io.StringIO(f"{HEADER}\n{line}\n"))
    return read


@st.composite
def architectures(draw: st.DrawFn) -> PublishedTransformer:
    heads = draw(st.integers(1, 4))
    counts = {
        name: draw(st.integers(1, 9))
        for name in ("num_classes", "ff_hidden_size", "seq_length", "input_size")
    }
    return replace(
        TINY,
        **counts,
        num_heads=heads,
        embedding_size=heads * draw(st.integers(1, 4)),
        num_layers=draw(st.integers(1, 3)),
        batch_size=draw(st.integers(1, 4)),
    )


@settings(max_examples=15)
@given(architectures())
def test_the_description_is_what_torch_builds_and_runs(architecture: PublishedTransformer) -> None:
    with torch.device("meta"):
        network = build(architecture)
        tokens = torch.empty(architecture.batch_size, architecture.seq_length, dtype=torch.long)
    described = describe_network(architecture)
    extracted = extract_job(
        network, tokens, ExtractOptions(attention_kernel="memory_efficient")
    ).job
    assert [(layer.kind, layer.activations, layer.parameters) for layer in extracted.layers] == [
        (layer.kind, layer.activations, layer.parameters) for layer in described.layers
    ]
    assert (extracted.input_elements, extracted.sequence_length) == (
        described.input_elements,
        described.sequence_length,
    )
    assert sum(each.numel() for each in network.parameters()) == sum(
        layer.parameters for layer in described.layers
    )


def test_a_row_becomes_a_measurement() -> None:
    measurement = measurement_of_row(row(GOOD))
    job = measurement.job
    assert (job.family, job.batch_size, job.input_elements, job.sequence_length) == (
        "transformer",
        3,
        7,
        7,
    )
    assert (job.optimizer, job.precision, job.activation_function) == ("adam", "fp32", "relu")
    assert measurement.label_bytes == measurement.peak_device_bytes == 1500 * MIB
    assert (measurement.status, measurement.reason) == ("ok", None)
    assert (measurement.provenance, measurement.label_source) == (
        "published",
        "nvidia_smi_device_1s",
    )
    assert (measurement.gpu, measurement.torch, measurement.driver) == (
        "NVIDIA A100-SXM4-40GB",
        None,
        None,
    )
    assert parse(json.loads(measurement.architecture)) == TINY
    with torch.device("meta"):
        network = build(TINY)
    assert job.total_parameters == sum(each.numel() for each in network.parameters())


@pytest.mark.parametrize(("line", "stage"), [(OOM, "in training"), (EARLY_OOM, "before training")])
def test_an_oom_row_is_censored_and_keeps_its_phases(line: str, stage: str) -> None:
    measurement = measurement_of_row(row(line))
    assert (measurement.status, measurement.label_bytes) == ("oom", None)
    assert measurement.reason is not None
    assert stage in measurement.reason
