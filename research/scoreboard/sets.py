"""The sets of published runs that estimators are compared on, and the fixed sample of each for
estimators that take seconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme
from gpumemnet.units import MIB

Array = NDArray[np.float64]
SEED: Final = 0
_SMALL: Final = PUBLISHED_BINS[1000]
_LARGE: Final = PUBLISHED_BINS[8000]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTool:
    """A tool whose own published estimates stand in the rows' options.

    Attributes:
        name: on the scoreboard.
        option: the option with its estimate.
        unit_bytes: of that option.
        outcome: prefix of the options that say how its forecast and the run under its limit ended;
            ``None`` where nothing is told.
    """

    name: str
    option: str
    unit_bytes: int
    outcome: str | None = None


_XMEM_TOOLS: Final = tuple(
    PublishedTool(name=f"{name}, as published", option=f"{key}_bytes", unit_bytes=1, outcome=key)
    for name, key in (
        ("xMem", "xmem"),
        ("DNNMem", "dnnmem"),
        ("SchedTune", "schedtune"),
        ("LLMem", "llmem"),
    )
)
_ZOO_TOOLS: Final = (
    PublishedTool(name="FakeTensor, as published", option="fake_tensor_mib", unit_bytes=MIB),
    PublishedTool(name="Horus, as published", option="horus_mib", unit_bytes=MIB),
    PublishedTool(name="GPUMemNet's class, as published", option="gpumemnet_mib", unit_bytes=MIB),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRecipe:
    """Where a set comes from.

    Attributes:
        name: short name, in results and file names.
        title: for a person.
        file: dataset, relative to the folder of datasets.
        bins: of its bin accuracy.
        sample: rows for estimators that need the model.
        tools: whose published estimates its rows hold.
        is_real: whether its networks are real ones, split by architecture family; else sampled
            ones, split by architecture.
    """

    name: str
    title: str
    file: str
    bins: BinScheme
    sample: int
    tools: tuple[PublishedTool, ...] = ()
    is_real: bool = False


SETS: Final = (
    SetRecipe(
        name="mlp",
        title="Published MLPs, A100",
        file="published_mlp_a100.parquet",
        bins=_SMALL,
        sample=40,
    ),
    SetRecipe(
        name="cnn",
        title="Published CNNs, A100",
        file="published_cnn_a100.parquet",
        bins=_LARGE,
        sample=40,
    ),
    SetRecipe(
        name="transformer",
        title="Published transformers, A100",
        file="published_transformer_a100.parquet",
        bins=_LARGE,
        sample=40,
    ),
    SetRecipe(
        name="timm",
        title="timm models, A100",
        file="real_runs/published_timm_a100.parquet",
        bins=_LARGE,
        sample=40,
        tools=_ZOO_TOOLS[:1],
        is_real=True,
    ),
    SetRecipe(
        name="rtx",
        title="xMem's runs, RTX 3060 and 4060",
        file="real_runs/published_xmem_rtx30_40.parquet",
        bins=_SMALL,
        sample=125,
        tools=_XMEM_TOOLS,
        is_real=True,
    ),
    SetRecipe(
        name="zoo",
        title="Real vision models of GPUMemNet's figure, A100",
        file="published_real_models_a100.parquet",
        bins=_LARGE,
        sample=30,
        tools=_ZOO_TOOLS,
        is_real=True,
    ),
)


@dataclass(frozen=True, eq=False)
class RowSet:
    """The rows of a set that ended well or ran out of memory.

    Attributes:
        recipe: where they come from.
        rows: in the order of the file.
        sha256: of the file.
    """

    recipe: SetRecipe
    rows: tuple[Measurement, ...]
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def labels(self) -> Array:
        """Measured bytes, NaN where the run ran out of memory; shape ``[B]``."""
        return np.array(
            [np.nan if row.label_bytes is None else row.label_bytes for row in self.rows],
            dtype=np.float64,
        )

    @cached_property
    def capacities(self) -> Array:
        """Memory of each row's GPU that a job could have, shape ``[B]``."""
        return np.array([row.capacity_bytes for row in self.rows], dtype=np.float64)

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """Architecture, or architecture family, of each row as a code; folds keep it together.
        Shape ``[B]``."""
        names = [
            json.loads(row.architecture)["model"] if self.recipe.name == "zoo" else row.split_group
            for row in self.rows
        ]
        return np.unique(names, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def order(self) -> list[int]:
        """All rows in one fixed random order; samples are its beginning, so a longer sample holds
        the shorter one."""
        return list(np.random.default_rng(SEED).permutation(len(self.rows)).tolist())

    def architecture(self, row: int) -> Mapping[str, Any]:
        """The architecture column of a row, parsed."""
        return dict(json.loads(self.rows[row].architecture))

    def options(self, row: int) -> Mapping[str, Any]:
        """The options column of a row, parsed."""
        return dict(json.loads(self.rows[row].options))


def load_set(recipe: SetRecipe, folder: Path, most: int | None = None) -> RowSet:
    """Read a set.

    Args:
        recipe: where it comes from.
        folder: of the datasets.
        most: at most so many rows, by the set's random order; all by default.

    Raises:
        DatasetError: the file cannot be read.
    """
    path = folder / recipe.file
    kept = [
        row
        for row in read_dataset(path)
        if row.status in ("ok", "oom") and row.label_state != "startup"
    ]
    found = RowSet(recipe, tuple(kept), hashlib.sha256(path.read_bytes()).hexdigest())
    if most is None or most >= len(found):
        return found
    return RowSet(
        recipe,
        tuple(found.rows[row] for row in sorted(found.order[:most])),
        f"{found.sha256}, {most} rows",
    )
