"""Compiled modules give the same numbers as their source run by Python."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import gpumemnet
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import KINDS, Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics import closed_form, network_structure, step_memory
from gpumemnet.predict.features import feature_matrix
from tests.jobs import jobs, small_job

PACKAGE = Path(gpumemnet.__file__).parent
WORKSPACE = 8_519_680
COMPILED = [closed_form, network_structure, step_memory]
COLUMNS = step_memory.COLUMNS

compiled = pytest.mark.skipif(
    not closed_form.IS_COMPILED,
    reason="the package was installed without a C compiler: see CONTRIBUTING.md",
)


def uncompiled(name: str, others: Mapping[str, ModuleType] = MappingProxyType({})) -> ModuleType:
    """Imports the module ``folder/name`` from its source; it imports ``others`` in place of the
    compiled modules."""
    spec = importlib.util.spec_from_file_location(
        f"plain_{name.replace('/', '_')}", PACKAGE / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for other, there in others.items():
            patch.setitem(sys.modules, f"gpumemnet.{other.replace('/', '.')}", there)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    """The feature vector with uncompiled modules."""
    modules: dict[str, ModuleType] = {}
    for name in ("physics/step_memory", "physics/network_structure", "physics/closed_form"):
        modules[name] = uncompiled(name, modules)
        assert not modules[name].IS_COMPILED
    return uncompiled("predict/features", modules)


@compiled
@settings(max_examples=200)
@given(job=jobs())
def test_both_forms_agree(plain: ModuleType, job: TrainingJob) -> None:
    table = JobTable.from_jobs([job])
    np.testing.assert_array_equal(
        feature_matrix(table, WORKSPACE), plain.feature_matrix(table, WORKSPACE)
    )


@compiled
def test_both_forms_agree_on_long_lists_and_many_jobs(plain: ModuleType) -> None:
    chance = random.Random(0)
    kinds = [*KINDS, "something_new"]
    common = [
        *(
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
        ),
        *(
            "linear",
            "multiply",
            "concatenate",
            "add",
            "multiply",
            "rms_norm",
        ),  # often enough for rotations and gates
    ]
    many = []
    for _ in range(200):
        pool, largest = chance.choice([kinds, common]), 10 ** chance.choice([3, 5, 8])
        layers = tuple(
            Layer(
                chance.choice(pool),
                chance.randint(0, largest),
                chance.choice([0, chance.randint(0, largest)]),
            )
            for _ in range(chance.choice([0, 1, 3, 30, 200]))
        )
        totals = {} if layers else {"total_activations": 10, "total_parameters": 20}
        options = {
            "precision": chance.choice(["fp32", "bf16", "amp_fp16"]),
            "attention_kernel": chance.choice([None, "math"]),
            "checkpointing": chance.choice(["none", "every_block"]),
            "gradient_accumulation": chance.choice([1, 2]),
            "trainable_parameters": chance.choice(
                [None, 0, sum(layer.parameters for layer in layers) // 2]
            ),
        }
        many.append(
            small_job(batch_size=chance.randint(1, 5000), layers=layers, **options, **totals)
        )
    table = JobTable.from_jobs(many)
    np.testing.assert_array_equal(
        feature_matrix(table, WORKSPACE), plain.feature_matrix(table, WORKSPACE)
    )


def attributes(record: type) -> list[str]:
    """The attributes that the compiled form of a record declares."""
    return [name for name in vars(record) if not name.startswith("_")]


def job_numbers() -> step_memory.JobNumbers:
    """Every number and every option is 1."""
    numbers = step_memory.JobNumbers()
    for name in attributes(step_memory.JobNumbers):
        setattr(numbers, name, 1)
    return numbers


@compiled
@pytest.mark.parametrize(
    "spoilt",
    [
        *(
            {"features": np.zeros(COLUMNS - 1)},
            {"jobs": []},
            {"activations": np.ones(2)},
            {"parameters": np.ones(2)},
            {"trains": np.full(2, -1)},
            {"blocks": np.full(2, -1)},
        ),
        *(
            {"kinds": np.array([0, len(KINDS), 0])},
            {"kinds": np.array([0, -1, 0])},
            {"kinds": np.zeros(2, dtype=np.int64)},
        ),
        *(
            {"counts": np.array([4])},
            {"counts": np.array([-1])},
            {"counts": np.array([2**62] * 4), "jobs": [job_numbers()] * 4},
        ),
        *(
            {"width": COLUMNS - 1},
            {"width": 2**62},
            {"width": -(10**7), "begin": -(10**8)},
            {"begin": 1},
            {"begin": -1},
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(spoilt: dict[str, Any]) -> None:
    """The compiled form does not check where it writes, so all lengths and codes are checked
    before."""
    given: dict[str, Any] = {
        "features": np.zeros(COLUMNS),
        "width": COLUMNS,
        "begin": 0,
        "jobs": [job_numbers()],
        "counts": np.array([3]),
        "kinds": np.zeros(3, dtype=np.int64),
        "activations": np.ones(3),
        "parameters": np.ones(3),
        "trains": np.full(3, -1),
        "blocks": np.full(3, -1),
        "blas_workspace_bytes": 0.0,
    }
    closed_form.fill_columns(*given.values())
    assert given["features"][:2].tolist() == [1.0, 3.0]
    given |= spoilt
    with pytest.raises(ValueError, match=r"layers|jobs|code"):
        closed_form.fill_columns(*given.values())


def option_numbers() -> step_memory.OptionNumbers:
    """Every number and every option is 1."""
    numbers = step_memory.OptionNumbers()
    for name in attributes(step_memory.OptionNumbers):
        setattr(numbers, name, [1.0] * step_memory.FLAGS if name == "flags" else 1)
    return numbers


@compiled
@pytest.mark.parametrize(
    "spoilt",
    [
        *(
            {"features": np.zeros(2 * step_memory.TOTALS - 1)},
            {"width": step_memory.TOTALS - 1},
            {"options": []},
        ),
        *(
            {"numbers": np.ones(19)},
            {"codes": np.array([0, 1])},
            {"codes": np.array([-1, 0])},
            {"codes": np.zeros(3, np.int64)},
        ),
    ],
)
def test_totals_that_do_not_fit_are_refused(spoilt: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "features": np.zeros(2 * step_memory.TOTALS),
        "width": step_memory.TOTALS,
        "numbers": np.ones(20),
        "codes": np.array([0, 0]),
        "options": [option_numbers()],
    }
    assert len(step_memory.fill_totals(*given.values())) == 2
    assert given["features"].all()
    given |= spoilt
    with pytest.raises(ValueError, match=r"jobs|option set"):
        step_memory.fill_totals(*given.values())


@pytest.mark.parametrize("module", COMPILED)
def test_no_compiled_module_is_older_than_its_source(module: ModuleType) -> None:
    if not module.IS_COMPILED:
        pytest.skip("not compiled")
    text = PACKAGE.joinpath(*module.__name__.split(".")[1:]).with_suffix(".py")
    digest = hashlib.sha256(text.read_bytes() + text.with_suffix(".pxd").read_bytes()).hexdigest()
    assert digest == module.SOURCE_SHA256, "compiled from other source: pip install -e . again"


@compiled
def test_a_module_compiled_from_other_source_is_refused_in_one_sentence(tmp_path: Path) -> None:
    record = f"compiled_from{EXTENSION_SUFFIXES[0]}.json"
    shutil.copytree(
        PACKAGE, tmp_path / "gpumemnet", ignore=shutil.ignore_patterns("bundles", "__pycache__")
    )

    def load() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from gpumemnet.physics import closed_form"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (tmp_path / "gpumemnet" / record).exists()
    assert load().returncode == 0, load().stderr
    with (tmp_path / "gpumemnet/physics/network_structure.py").open("a") as source:
        source.write("# a line more\n")
    last_line = load().stderr.splitlines()[-1]
    assert "gpumemnet/physics/network_structure.py: changed after being compiled" in last_line
    assert f"-m pip install --no-deps --editable {tmp_path}" in last_line


@pytest.mark.skipif(
    os.environ.get("GPUMEMNET_COMPILE") != "1", reason="GPUMEMNET_COMPILE does not ask for it"
)
@pytest.mark.parametrize("module", COMPILED)
def test_it_is_compiled_where_that_was_asked_for(module: ModuleType) -> None:
    assert module.IS_COMPILED
