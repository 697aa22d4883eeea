"""Samples of a recipe: distinct, trainable, repeatable, and spread over features and memory."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dataset_builder.families import extracted_job, family
from dataset_builder.planned_job import (
    PlannedJob,
    can_run,
    operations_per_step,
    rough_bytes,
)
from dataset_builder.recipe import Choices, Recipe, load_recipe, sample_jobs
from gpumemnet.errors import InvalidRequestError
from gpumemnet.units import GIB

CAPACITY_BYTES = 141 * GIB
JOBS = 300

FEW_NETWORKS = """
family: mlp
features: {shape: [uniform, residual], depth: [2, 4], width: 1024, input_width: [64, 4096],
  output_width: 10, activation: relu, norm: [none, batch_norm], dropout: 0.0}
options: {batch_size: {from: 1, to: 65536, scale: log}, optimizer: [sgd, adam],
  optimizer_implementation: [default, fused], frozen_share: [0.0, 0.5]}
work: {max_pflop_per_step: 0.005}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe of sixteen networks."""
    path: Path = tmp_path_factory.mktemp("recipe") / "few.yaml"
    path.write_text(FEW_NETWORKS)
    return load_recipe(str(path))


def check_sample(recipe: Recipe, jobs: list[PlannedJob]) -> None:
    assert len({job.key for job in jobs}) == len(set(jobs)) == JOBS
    for job in jobs:
        kernel = getattr(job.architecture, "attention_kernel", None)
        assert family(job.family).can_train(job.architecture, job.options.batch_size)
        assert can_run(job.options, kernel)
        assert operations_per_step(job) <= recipe.max_operations
    for name, feature in recipe.options.items():
        if isinstance(feature, Choices):
            counts = Counter(getattr(job.options, name) for job in jobs)
            for value, share in zip(feature.values, feature.shares, strict=True):
                assert counts[value] <= 1.6 * share * JOBS, (name, counts)


def test_jobs_are_distinct_can_train_and_are_spread(recipe: Recipe) -> None:
    check_sample(recipe, sample_jobs(recipe, JOBS, 7, CAPACITY_BYTES))


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_shipped_recipes_fill_the_memory_of_a_card(name: str) -> None:
    recipe = load_recipe(name)
    jobs = sample_jobs(recipe, JOBS, 7, CAPACITY_BYTES)
    check_sample(recipe, jobs)
    estimates = [rough_bytes(job) for job in jobs]
    octaves = Counter(int(math.log2(each / GIB * 2)) for each in estimates)
    assert set(octaves) >= set(range(8)), octaves
    assert max(estimates) > 0.75 * CAPACITY_BYTES
    assert max(octaves.values()) < 0.25 * JOBS


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_rough_sizes_follow_the_extracted_ones(name: str) -> None:
    """Nothing but the draw and the admission of jobs depends on them: a factor of two is enough."""
    ratios = []
    for job in sample_jobs(load_recipe(name), 6, 1, 4 * GIB):
        rough = family(name).rough_sizes(job.architecture)
        layers = extracted_job(name, job.architecture).layers
        ratios.append(
            (
                rough.parameters / sum(layer.parameters for layer in layers),
                rough.activations / sum(layer.activations for layer in layers),
            )
        )
        assert rough.outputs == layers[-1].activations
    assert np.all(np.abs(np.log2(np.median(ratios, axis=0))) < 0.8), ratios
    assert np.all(np.abs(np.log2(ratios)) < 2), ratios


def test_the_seed_decides(recipe: Recipe) -> None:
    first = [sample_jobs(recipe, 20, seed, CAPACITY_BYTES) for seed in (1, 1, 2)]
    assert first[0] == first[1]
    assert set(first[0]) != set(first[2])


def test_a_sample_is_what_it_was(recipe: Recipe) -> None:
    """Rows of one recipe and seed, measured years apart, join into one dataset."""
    keys = [job.key for job in sample_jobs(recipe, 3, 0, CAPACITY_BYTES)]
    assert keys == ["6155dc092fa7d716", "854a2ec144598a72", "a008eb598398f977"]


def test_a_space_that_is_too_small_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "family: mlp\nfeatures: {shape: uniform, depth: 1, width: 64, input_width: 8, output_width: 2, activation: relu,"
        " norm: none, dropout: 0.0}\noptions: {batch_size: [1, 2, 4]}\n"
    )
    assert len(sample_jobs(load_recipe(str(path)), 3, 0, CAPACITY_BYTES)) == 3
    with pytest.raises(InvalidRequestError, match="'tiny' gave only 3 distinct jobs"):
        sample_jobs(load_recipe(str(path)), 4, 0, CAPACITY_BYTES)
