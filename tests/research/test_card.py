"""The data card: numbers that are counted from the file, limits that are judged rightly, and
pictures that are there.

Rows that were not published are built here, in memory, for files that live as long as the test.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset_builder.families import family, mlp
from dataset_builder.planned_job import (
    Options,
    PlannedJob,
    can_run,
    rough_bytes,
    training_job,
)
from dataset_builder.recipe import load_recipe
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import GIB, MIB
from research.data_card import write_card
from research.published_tables.importing import read_published
from research.sample_coverage import (
    feature_values,
    spread,
    spreads,
)


def jobs_of_shipped_recipe() -> Iterator[PlannedJob]:
    """Jobs at random points of the shipped recipe that fit into 20 GiB."""
    recipe, position = load_recipe("mlp"), np.random.default_rng(0).random
    while True:
        point: dict[str, Any] = {
            name: each.value(position())
            for name, each in {**recipe.features, **recipe.options}.items()
        }
        architecture = mlp.compose({name: point.pop(name) for name in recipe.features})
        planned = PlannedJob("mlp", architecture, Options(**point))
        if family("mlp").can_train(architecture, planned.options.batch_size):
            fits = rough_bytes(planned) < 20 * GIB
            if fits and can_run(planned.options, None):
                yield planned


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    """Jobs of the shipped recipe with made-up labels: what a card is made of, never a dataset."""
    made = []
    for index, planned in enumerate(itertools.islice(jobs_of_shipped_recipe(), 40)):
        job = training_job(planned)
        label = rough_bytes(planned)
        fits = index % 10 != 3
        made.append(
            Measurement(
                job=job,
                status="ok" if fits else "oom",
                reason=None if fits else "out of memory",
                label_source="nvml_process",
                capacity_bytes=24 * GIB,
                provenance="measured",
                gpu="NVIDIA Example",
                recipe="zoo" if index == 0 else "mlp",
                architecture=planned.architecture_json,
                options=planned.options_json,
                peak_process_bytes=label if fits else None,
                peak_reserved_bytes=label - 500 * MIB if fits else None,
                context_bytes=(500 + index % 9) * MIB if fits else None,
                driver="580.1",
                cuda="12.8",
                torch="2.11.0",
                protocol="step-1",
                seed=0,
                steps=3,
                seconds=1.0,
                neighbours=0,
            )
        )
    return made


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with ``first``."""
    [line] = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_numbers_of_the_card_are_those_of_the_file(
    tmp_path: Path, rows: list[Measurement]
) -> None:
    path = tmp_path / "d.parquet"
    write_dataset(path, rows)
    paths = write_card(path, tmp_path / "card")
    text = paths[0].read_text()
    read = read_dataset(path)
    statuses = Counter(row.status for row in read)
    assert statuses["oom"] > 0
    expected = [f"{statuses[each]}" for each in ("ok", "oom", "timeout", "error")]
    assert cells(text, "all")[2:7] == [*expected, "40"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    assert cells(text, "NVIDIA Example")[1:5] == ["580.1", "12.8", "–", "2.11.0"]
    assert cells(text, "optimizer")[1] == "39", "the real model is not counted in the coverage"
    contexts = sorted(row.context_bytes // MIB for row in read if row.context_bytes)
    assert f"| mlp | NVIDIA Example | {len(contexts)} | 500 MiB |" in text
    pictures = re.findall(r"\((\w+\.png)\)", text)
    assert sorted(pictures) == [
        "labels.png",
        "map_mlp.png",
    ]
    assert sorted(path.name for path in paths[1:]) == sorted(pictures)
    for name in pictures:
        data = (tmp_path / "card" / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 5_000


def test_published_rows_are_credited(tmp_path: Path, published_csv: Path) -> None:
    path = tmp_path / "p.parquet"
    write_dataset(path, itertools.islice(read_published(published_csv), 300))
    text = write_card(path, tmp_path / "card")[0].read_text()
    assert "300 published rows: GPUMemNet" in text
    assert "CC BY 4.0" in text
    assert cells(text, "output_activation")[-1] == "**above**"
    assert cells(text, "shape")[-1] == ""
    assert cells(text, "below-floor") == ["below-floor", "2"]


def test_features_are_options_and_all_of_the_architecture(rows: list[Measurement]) -> None:
    values = feature_values(rows[0])
    assert {
        "batch_size",
        "optimizer",
        "precision",
        "frozen_share",
        "shape",
        "norm",
        "hidden_widths (count)",
    } <= set(values)
    assert {"total_parameters", "output_activation"} & set(values) == {"output_activation"}
    nested = replace(
        rows[0],
        architecture='{"widths": [[8, 16], [32]], "names": ["a"], "block": {"kernel": 3}, "head": null}',
    )
    found = feature_values(nested)
    assert (found["widths (count)"], found["widths (largest)"], found["block.kernel"]) == (3, 32, 3)
    assert "names (largest)" not in found
    assert "head" not in found


def test_an_even_sample_is_within_its_limits_and_an_uneven_one_is_not() -> None:
    generator = np.random.default_rng(0)
    even = [int(each) for each in 2 ** generator.uniform(0, 16, 2_000)]
    assert spread("batch_size", even).within
    assert not spread(
        "batch_size", [int(each) for each in generator.uniform(1, 65_536, 2_000)]
    ).within
    few = spread("depth", [int(each) for each in 2 ** generator.uniform(0, 4.4, 2_000)])
    assert few.is_range, "whole numbers are shared out up to the next"
    assert few.within
    assert spread("patch", [8, 16, 32] * 100).within, "a list of choices"
    crowded = spread("norm", ["batch_norm"] * 76 + ["none"] * 24)
    assert (crowded.fullest, crowded.within, crowded.limit) == ("batch_norm", False, 0.75)
    assert spread("flag", [True] * 75 + [False] * 25).within
    assert not spreads([])
