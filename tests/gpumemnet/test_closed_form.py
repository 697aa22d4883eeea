"""The closed form's two forms are one: what Cython has compiled gives the numbers of the module as it stands."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings

from gpumemnet import closed_form, features
from gpumemnet.features import feature_matrix
from gpumemnet.job import TrainingJob
from gpumemnet.layers import KINDS, Layer
from tests.jobs import jobs, small_job

SOURCE = Path(features.__file__).with_name("closed_form.py")
WORKSPACE = 8_519_680

compiled = pytest.mark.skipif(
    not closed_form.IS_COMPILED, reason="the closed form is not compiled: install with a C compiler at hand, see CONTRIBUTING.md"
)


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    """The module as it stands, and the features that use it."""
    loaded = {}
    for name in ("closed_form", "features"):
        spec = importlib.util.spec_from_file_location(f"plain_{name}", SOURCE.with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        own = sys.modules["gpumemnet.closed_form"]
        sys.modules["gpumemnet.closed_form"] = loaded.get("closed_form", own)
        try:
            spec.loader.exec_module(module)
        finally:
            sys.modules["gpumemnet.closed_form"] = own
        loaded[name] = module
    assert not loaded["closed_form"].IS_COMPILED
    assert not loaded["features"].IS_COMPILED
    return loaded["features"]


@compiled
@settings(max_examples=200)
@given(job=jobs())
def test_both_forms_agree(plain: ModuleType, job: TrainingJob) -> None:
    np.testing.assert_array_equal(feature_matrix([job], WORKSPACE), plain.feature_matrix([job], WORKSPACE))


@compiled
def test_both_forms_agree_on_long_lists_and_many_jobs(plain: ModuleType) -> None:
    chance = random.Random(0)
    kinds = [*KINDS, "something_new"]
    common = [
        "linear",
        "matmul",
        "softmax",
        "dropout",
        "add",
        "layer_norm",
        "embedding",
        "attention",
        "conv2d",
        "relu",
        "identity",
    ]
    many = []
    for _ in range(200):
        pool, largest = chance.choice([kinds, common]), 10 ** chance.choice([3, 5, 8])
        layers = tuple(
            Layer(chance.choice(pool), chance.randint(0, largest), chance.choice([0, chance.randint(0, largest)]))
            for _ in range(chance.choice([0, 1, 3, 30, 200]))
        )
        totals = {} if layers else {"total_activations": 10, "total_parameters": 20}
        options = {
            "precision": chance.choice(["fp32", "bf16", "amp_fp16"]),
            "attention_kernel": chance.choice([None, "math"]),
            "checkpointing": chance.choice(["none", "every_block"]),
            "gradient_accumulation": chance.choice([1, 2]),
            "trainable_parameters": chance.choice([None, 0, sum(layer.parameters for layer in layers) // 2]),
        }
        many.append(small_job(batch_size=chance.randint(1, 5000), layers=layers, **options, **totals))
    np.testing.assert_array_equal(feature_matrix(many, WORKSPACE), plain.feature_matrix(many, WORKSPACE))


@compiled
@pytest.mark.parametrize("spoilt", ["answers", "jobs", "counts", "negative", "kinds", "activations", "parameters", "code"])
def test_numbers_that_do_not_fit_are_refused(spoilt: str) -> None:
    """The compiled form does not look where it writes: it has to look before."""
    width = closed_form.ANSWER_WIDTH
    buffers = {
        "answers": np.zeros(width),
        "jobs": np.ones(len(closed_form.JOB_COLUMNS)),
        "counts": np.array([3]),
        "kinds": np.zeros(3, dtype=np.int64),
        "activations": np.ones(3),
        "parameters": np.ones(3),
    }

    def fill() -> None:
        answers, *given = buffers.values()
        closed_form.fill_columns(answers, width, 0, *given, 0)

    fill()
    assert buffers["answers"][0] == 1.0
    if spoilt == "counts":
        buffers["counts"] = np.array([4])
    elif spoilt == "negative":
        buffers["counts"] = np.array([-1])
    elif spoilt == "code":
        buffers["kinds"][1] = len(KINDS)
    else:
        buffers[spoilt] = buffers[spoilt][:-1].copy()
    with pytest.raises(ValueError, match=r"layers|jobs|code"):
        fill()


@pytest.mark.skipif(os.environ.get("GPUMEMNET_COMPILE") != "1", reason="GPUMEMNET_COMPILE does not ask for it")
def test_it_is_compiled_where_that_was_asked_for() -> None:
    assert closed_form.IS_COMPILED
