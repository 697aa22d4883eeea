"""Samples of a recipe: distinct, trainable, repeatable, and spread over features and memory."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from dataset_builder.families import family
from dataset_builder.recipe.planned_job import (
    PlannedJob,
    option_obstacle,
    rough_bytes,
    training_job,
)
from dataset_builder.recipe.recipe import Choices, load_recipe
from dataset_builder.recipe.sampling import sample_jobs
from gpumemnet.errors import InvalidRequestError
from gpumemnet.units import GIB

CAPACITY_BYTES = 141 * GIB


@pytest.fixture(scope="module")
def jobs() -> list[PlannedJob]:
    return sample_jobs(load_recipe("mlp"), 1_500, 7, CAPACITY_BYTES)


def test_jobs_are_distinct_and_can_train(jobs: list[PlannedJob]) -> None:
    assert len({job.key for job in jobs}) == len(set(jobs)) == 1_500
    for job in jobs:
        assert family(job.family).obstacle(job.architecture, job.options.batch_size) is None
        assert option_obstacle(job.options) is None
        assert training_job(job).trainable_parameters


def test_memory_has_no_empty_octave_up_to_three_quarters_of_the_card(
    jobs: list[PlannedJob],
) -> None:
    estimates = [rough_bytes(training_job(job)) for job in jobs]
    octaves = Counter(int(math.log2(each / GIB * 2)) for each in estimates)
    assert set(octaves) >= set(range(8)), octaves
    assert max(estimates) > 0.75 * CAPACITY_BYTES
    assert max(octaves.values()) < 0.5 * len(jobs)


def test_no_tenth_of_a_number_and_no_choice_is_overcrowded(jobs: list[PlannedJob]) -> None:
    recipe = load_recipe("mlp")
    for name, low, high in (
        ("batch_size", 1, 65_536),
        ("input_width", 4, 16_384),
        ("output_width", 2, 16_384),
    ):
        values = [
            getattr(job.options, name, None) or getattr(job.architecture, name) for job in jobs
        ]
        tenths, _ = np.histogram(
            np.log(values), bins=np.linspace(math.log(low), math.log(high + 1), 11)
        )
        assert tenths.max() <= 0.2 * len(jobs), (name, tenths)
        assert tenths.min() >= 0.03 * len(jobs), (name, tenths)
    for part, features in (("options", recipe.options), ("architecture", recipe.features)):
        for name, feature in features.items():
            if isinstance(feature, Choices):
                commonest = Counter(getattr(getattr(job, part), name) for job in jobs).most_common(
                    1
                )[0][1]
                assert commonest <= 1.5 * len(jobs) / len(feature.values), name


def test_the_seed_decides(jobs: list[PlannedJob]) -> None:
    recipe = load_recipe("mlp")
    first = [sample_jobs(recipe, 20, seed, CAPACITY_BYTES) for seed in (1, 1, 2)]
    assert first[0] == first[1]
    assert not set(first[0]) & set(first[2])


def test_a_space_that_is_too_small_says_so(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "family: mlp\nfeatures: {shape: uniform, depth: 1, width: 64, input_width: 8, output_width: 2, activation: relu,"
        " norm: none, dropout: 0.0}\noptions: {batch_size: [1, 2, 4]}\n"
    )
    assert len(sample_jobs(load_recipe(str(path)), 3, 0, CAPACITY_BYTES)) == 3
    with pytest.raises(InvalidRequestError, match="'tiny' gave only 3 distinct jobs"):
        sample_jobs(load_recipe(str(path)), 4, 0, CAPACITY_BYTES)
