"""Published CNNs: the rebuilt network has the parameters that the table gives it, and a row comes
through or is named."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpumemnet.units import MIB
from research.published_tables.cnn import (
    COLUMNS,
    SHAPES,
    PublishedCnn,
    build,
    filters,
    loss,
    measurement_of_row,
    parse,
    tensors,
)
from research.published_tables.importing import read_published

NAME = (
    "input_channels:3_num_classes:10_depth:4_arch:{arch}_base_filters:8_batch:5_input_size:16_act:{act}"
    "_dropout:0.25_dropout:True_batchnorm:True.out"
)
HEADER = ",".join(COLUMNS)


def row(line: str) -> dict[str, str | None]:
    [read] = csv.DictReader(io.StringIO(f"{HEADER}\n{line}\n"))
    return read


def parameters(arch: str, act: str = "relu") -> int:
    with torch.device("meta"):
        network = build(PublishedCnn(arch, 3, 10, 4, 8, 16, act, 0.25, True))
    return sum(p.numel() for p in network.parameters()) - 4 * (act == "prelu")


def test_a_plain_network_by_hand() -> None:
    # four convolutions of 3 x 3, each with a batch norm, and the head
    by_hand = (3 * 9 + 1) * 8 + 3 * (8 * 9 + 1) * 8 + 4 * 2 * 8 + (8 + 1) * 10
    assert parameters("uniform") == parameters("uniform", "prelu") == by_hand
    assert filters(PublishedCnn("uniform", 3, 10, 4, 8, 16, "relu", 0.0, False)) == [8] * 4


@settings(max_examples=20)
@given(
    st.sampled_from(SHAPES),
    st.integers(2, 9),
    st.integers(2, 40),
    st.integers(8, 40),
    st.booleans(),
)
def test_every_network_trains(arch: str, depth: int, base: int, size: int, norm: bool) -> None:
    architecture = PublishedCnn(arch, 3, 7, depth, base, size, "gelu", 0.1, norm)
    assert parse(asdict(architecture)) == architecture
    with torch.device("meta"):
        network = build(architecture)
        (image,), target = tensors(architecture)
        outputs = network(torch.empty(2, *image.shape))
        assert outputs.shape == (2, 7)
        torch.autograd.backward(loss(outputs, torch.empty(2, *target.shape, dtype=torch.long)))
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert isinstance(list(network.children())[-1], nn.Softmax)


def test_a_row_becomes_a_measurement(tmp_path: Path) -> None:
    name = NAME.format(arch="residual", act="prelu")
    good = f"{name},{parameters('residual', 'prelu')},5,1500,5,SUCCESSFUL"
    made = measurement_of_row(row(good))
    assert made.label_bytes == 1500 * MIB
    assert (made.job.family, made.job.batch_size, made.job.optimizer, made.job.precision) == (
        "cnn",
        5,
        "adam",
        "fp32",
    )
    table = tmp_path / "cnns.csv"
    table.write_text(f"{HEADER},Depth\n{good},4\n{good.replace('SUCCESSFUL', 'OOM_CRASH')},4\n")
    assert [m.status for m in read_published(table)] == ["ok", "oom"]


def test_rows_that_cannot_be_rebuilt_are_counted(tmp_path: Path) -> None:
    total = parameters("uniform")
    good = f"{NAME.format(arch='uniform', act='relu')},{total},5,1500,4,SUCCESSFUL"
    table = tmp_path / "cnns.csv"
    table.write_text(
        f"{HEADER}\n{good}\n{good.replace('uniform', 'dense')}\n{good.replace(f',{total},', ',0,')}\n"
    )
    left_out: Counter[str] = Counter()
    assert len(list(read_published(table, left_out))) == 1
    assert sorted(left_out.values()) == [1, 1]
