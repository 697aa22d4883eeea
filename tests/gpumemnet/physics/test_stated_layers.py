"""What layers and jobs may state beside sizes: which layers train, their blocks, and how the loop
runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.features import FEATURE_NAMES, feature_matrix
from gpumemnet.units import MIB

WIDTH, SAMPLES = 4096, 8192
OUTPUT = WIDTH * SAMPLES * 4
WEIGHT = WIDTH * WIDTH * 4


def job(*said: tuple[bool | None, int | None], **fields: Any) -> TrainingJob:
    """Linear layers and their GELUs."""
    layers = []
    for trains, block in said:
        layers.append(Layer("linear", WIDTH, WIDTH * WIDTH, trains, block))
        layers.append(Layer("gelu", WIDTH, 0, None if trains is None else False, block))
    values = {"family": "mlp", "optimizer": "adam", "precision": "fp32"} | fields
    return TrainingJob(batch_size=SAMPLES, input_elements=WIDTH, layers=tuple(layers), **values)


def feature(name: str, of: TrainingJob) -> float:
    return float(feature_matrix(JobTable.from_jobs([of]), 8 * MIB)[0, FEATURE_NAMES.index(name)])


def kept(of: TrainingJob) -> float:
    return feature("kept_by_linear_bytes", of) + feature("kept_by_activation_bytes", of)


def test_frozen_layers_before_the_first_trained_one_keep_nothing() -> None:
    # The last frozen GELU's output is what the trained layer's gradient needs.
    first_frozen = job((False, None), (False, None), (True, None))
    assert kept(first_frozen) == 2 * OUTPUT
    assert first_frozen.trainable_parameters == WIDTH * WIDTH
    assert feature("resident_bytes", first_frozen) == pytest.approx(5 * WEIGHT + OUTPUT, rel=0.01)


def test_frozen_layers_behind_it_keep_what_the_gradient_of_their_input_needs() -> None:
    # A GELU keeps its input; a frozen linear layer needs its weight alone.
    assert kept(job((True, None), (False, None), (False, None))) == 3 * OUTPUT
    assert kept(job((True, None), (True, None), (True, None))) == 5 * OUTPUT


def test_what_layers_say_that_the_order_would_give_changes_nothing() -> None:
    assert kept(job((None, None), (None, None), (None, None))) == 5 * OUTPUT
    unknown = replace(job((None, None), (None, None)), trainable_parameters=WIDTH * WIDTH)
    assert kept(unknown) == kept(job((False, None), (True, None)))


def test_stated_blocks_are_those_that_are_recomputed() -> None:
    blocks = [(True, 0), (True, 1), (True, 1), (True, 2), (True, 2), (True, 0)]
    whole = job(*blocks, checkpointing="every_block")
    assert feature("block_count", whole) == 2
    guessed = job(*[(True, None)] * 6, checkpointing="every_block")
    assert feature("block_count", guessed) == 5
    assert feature("backward_bytes", whole) > feature("backward_bytes", guessed)


def test_batches_and_outputs_that_a_loop_keeps() -> None:
    unknown = job((None, None), (None, None), optimizer="sgd")
    assert feature("resident_bytes", replace(unknown, batches_on_gpu=3)) == (
        feature("resident_bytes", unknown) + 2 * OUTPUT
    )
    assert feature("backward_bytes", replace(unknown, outputs_freed="before_backward")) == (
        feature("backward_bytes", unknown) - OUTPUT
    )
    assert feature("step_bytes", replace(unknown, outputs_freed="before_backward")) == (
        feature("step_bytes", unknown) - OUTPUT
    )
    same = replace(unknown, outputs_freed="after_step", batches_on_gpu=1)
    assert feature("segment_bytes", same) == feature("segment_bytes", unknown)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"trains": "yes"}, "trains"),
        ({"trains": 1}, "trains"),
        ({"block": -1}, "block"),
        ({"block": True}, "block"),
    ],
)
def test_a_layer_that_says_nonsense_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJobError) as refused:
        Layer("linear", 1, 1, **fields)
    assert refused.value.field == field


def test_no_more_parameters_train_than_are_not_frozen() -> None:
    with pytest.raises(InvalidJobError, match="of layers that train"):
        replace(job((False, None), (True, None)), trainable_parameters=2 * WIDTH * WIDTH)


def chain(*layers: Layer, **fields: Any) -> TrainingJob:
    values = {"family": "mlp", "optimizer": "sgd", "precision": "fp32"} | fields
    return TrainingJob(batch_size=SAMPLES, input_elements=WIDTH, layers=layers, **values)


def test_later_frozen_layers_take_the_segments_of_earlier_ones() -> None:
    wide, narrow = (Layer("linear", WIDTH // share, 8, False) for share in (1, 4))
    head = Layer("linear", 8, 8, True)
    growing = feature("segment_bytes", chain(narrow, narrow, wide, wide, head))
    shrinking = feature("segment_bytes", chain(wide, wide, narrow, narrow, head))
    assert shrinking == feature("segment_bytes", chain(wide, wide, head))
    assert growing > shrinking


@pytest.mark.parametrize(
    ("kinds", "kept_outputs"),
    [
        # a GELU by its sigmoid keeps what the sigmoid is computed from, the sigmoid, and its result
        (("linear", "other", "sigmoid", "multiply", "linear"), 3),
        # the product keeps its operand, the scale of scores nothing, softmax and ReLU their results
        (("linear", "matmul", "multiply", "softmax", "relu"), 3),
    ],
)
def test_products_keep_their_factors_once(kinds: tuple[str, ...], kept_outputs: int) -> None:
    layers = [Layer(kind, WIDTH, 8 if kind == "linear" else 0) for kind in kinds]
    job = chain(*layers)
    kept_bytes = sum(
        feature(name, job)
        for name in FEATURE_NAMES
        if name.startswith("kept_by_") and name.endswith("_bytes")
    )
    assert kept_bytes == kept_outputs * OUTPUT
