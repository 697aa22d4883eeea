"""GPUMemNet's published readings of timm models (``Related_works/FakeTensor/fake_tensor.xlsx``, CC
BY 4.0), and these models.

What ran is told in ``dataset_builder/datasets/README.md``: timm's training script with its
defaults.  A row that did not run well keeps its reading and says why in ``reason``; the rules are
those of :func:`_outcome`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from gpumemnet.errors import DatasetError
from gpumemnet.extract.placement import placement
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.units import MIB

from .architecture_families import architecture_family
from .real_runs import Reading, RealModel, RealRuns, Row, family_by_family
from .rows import PUBLISHED_CAPACITY_BYTES, PUBLISHED_GPU, count_in

COLUMNS: Final = (
    "model",
    "batch_size",
    "input",
    "num_classes",
    "measured_mib",
    "faketensor_mib",
    "usable",
)
RECIPE: Final = "timm"
TIMM_VERSION: Final = "1.0.9"
"""The version whose models were measured."""
OPTIONS: Final = TraceOptions(
    optimizer="sgd_momentum",
    precision="fp32",
    optimizer_implementation="foreach",
    cudnn_benchmark=True,
    loss="cross_entropy",
    keeps_names=False,
    own_optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=2e-5, foreach=True),
)
"""The defaults of timm's ``train.py``.  With weight decay, the ``foreach`` SGD adds a copy of all
gradients to each step (``_multi_tensor_sgd`` in ``torch/optim/sgd.py``)."""
CLASSES: Final = 1_000
"""Labels of ImageNet: a model with fewer outputs fails in its first loss."""
FULL_MIB: Final = 36_000
"""What forward and backward pass may take, by FakeTensor, to leave room for the rest on a card of
40,960 MiB; readings above it are of runs that came close to the card's end, or beyond."""
_DETECTION: Final = ("nms", "qnms")


def read(rows: Sequence[Row]) -> RealRuns:
    """The models and readings of the table.

    Raises:
        DatasetError: a cell holds no number.
    """
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row)
    usable = {
        name for name, group in by_model.items() if any(row["usable"] == "yes" for row in group)
    }
    names = family_by_family(list(by_model), architecture_family, usable.__contains__)
    return RealRuns(
        tuple(map(real_model, names)), tuple(_reading(row, by_model[row["model"]]) for row in rows)
    )


def real_model(name: str) -> RealModel:
    """The timm model ``name``, as it was trained."""
    return RealModel(
        key=name,
        build=partial(build, name),
        sample=_images,
        options=OPTIONS,
        gpu=PUBLISHED_GPU,
        prefetches=True,
        tries_transforms=True,
    )


def _reading(row: Row, group: Sequence[Row]) -> Reading:
    status, reason = _outcome(row, group)
    name = row["model"]
    fields = {
        "status": status,
        "reason": reason,
        "label_source": "nvidia_smi_device_1s",
        "capacity_bytes": PUBLISHED_CAPACITY_BYTES,
        "provenance": "published",
        "gpu": PUBLISHED_GPU,
        "recipe": RECIPE,
        "architecture": json.dumps(
            {"library": f"timm {TIMM_VERSION}", "model": name}, sort_keys=True
        ),
        "architecture_family": architecture_family(name),
        "options": json.dumps({"fake_tensor_mib": float(row["faketensor_mib"])}),
        "peak_device_bytes": count_in(row, "measured_mib") * MIB,
        "neighbours": 0,
    }
    return Reading(model=name, batch_size=count_in(row, "batch_size"), fields=fields)


def _outcome(row: Row, group: Sequence[Row]) -> tuple[str, str | None]:
    """Status and reason of a row: ``ok``, ``oom`` where the job cannot have fitted, ``error`` where
    it crashed or may have.

    Args:
        row: the row.
        group: all rows of its model.
    """
    measured, estimate = count_in(row, "measured_mib"), float(row["faketensor_mib"])
    if estimate >= FULL_MIB:
        return "oom", f"forward and backward pass alone take {estimate:,.0f} MiB by FakeTensor"
    classes = row["num_classes"]
    if not classes:
        return "error", "the table does not say how many classes the model has"
    if int(classes) < CLASSES:
        return (
            "error",
            f"labels out of range: the model has {int(classes):,} outputs, and ImageNet {CLASSES:,} classes",
        )
    if measured >= FULL_MIB:
        return (
            "error",
            f"the reading, {measured:,} MiB, is near the card's capacity: it may have run out of memory",
        )
    if measured < estimate:
        return (
            "error",
            f"the reading, {measured:,} MiB, is below what FakeTensor counts, {estimate:,.0f} MiB",
        )
    if row["usable"] != "yes":
        return (
            "error",
            "the reading does not rise with the batch size: this run, or one of a smaller batch, was not seen whole",
        )
    return "ok", None


def load_timm() -> Any:
    """Import timm.

    torchvision's operators for detection exist in builds for the installed torch only.  No model
    here uses them, so they are
    declared where they are missing: torchvision, which timm imports, can then be loaded beside any
    torch.

    Raises:
        DatasetError: timm is missing, or another version.
    """
    declare_detection()
    try:
        import timm
    except ImportError as error:
        raise DatasetError(
            f"the published models need timm {TIMM_VERSION}, which cannot be imported: {error}"
        ) from None
    if timm.__version__ != TIMM_VERSION:
        raise DatasetError(
            f"timm {TIMM_VERSION} was measured, and {timm.__version__} is installed: pip install timm=={TIMM_VERSION}"
        )
    return timm


def declare_detection() -> None:
    """Declare torchvision's operators for detection where its build brings none for the installed
    torch."""
    try:
        import torchvision  # noqa: F401  # a build for the installed torch registers them itself, and only once
    except ImportError:
        return
    except RuntimeError:
        for name in _DETECTION:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(
                    f"torchvision::{name}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )


def build(name: str) -> nn.Module:
    """The network on meta tensors, with no weights downloaded.

    Raises:
        DatasetError: as :func:`load_timm`.
    """
    timm = load_timm()
    with placement(), torch.device("meta"):
        network: nn.Module = timm.create_model(name)
    return network


def _images(network: nn.Module, batch_size: int) -> torch.Tensor:
    configuration: Mapping[str, Any] = network.default_cfg  # type: ignore[assignment]
    return torch.empty(batch_size, *configuration["input_size"], device="meta")
