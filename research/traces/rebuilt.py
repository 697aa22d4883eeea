"""Any row of a dataset as a job that can be run: the sampled networks, and the real models that
others have run.

The scoreboard calls :func:`rebuilt` where an estimator needs the model itself.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from gpumemnet.errors import DatasetError
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import DeviceProfile
from gpumemnet.job.measurement import PUBLISHED, Measurement
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from research.published_tables import real_models, timm_models, xmem_models
from research.published_tables.real_runs import RealModel
from research.traces.labels import subject

from .labels import Subject


def rebuilt(row: Measurement, device: DeviceProfile) -> Subject:
    """``row`` with its network on meta tensors, as it was trained.

    Raises:
        DatasetError: its network cannot be rebuilt, or the library that it came from is missing or
            of another version.
    """
    document = json.loads(row.architecture)
    if row.provenance == PUBLISHED and row.recipe == timm_models.RECIPE:
        return _of_real_run(row, timm_models.real_model(document["model"]), device)
    if row.provenance == PUBLISHED and row.recipe == xmem_models.RECIPE:
        return _of_real_run(row, xmem_models.real_model(row), device)
    if row.provenance == PUBLISHED and row.recipe == real_models.RECIPE:
        return _of_real_model(row, document, device)
    return subject(row, device)


def _of_real_run(row: Measurement, model: RealModel, device: DeviceProfile) -> Subject:
    network = model.build()
    example = model.sample(network, row.job.batch_size)
    platform = model.platform_on(device)
    return Subject(row, network, inputs_from_example(example, None), model.options, platform)


def _of_real_model(row: Measurement, document: dict[str, Any], device: DeviceProfile) -> Subject:
    model = next(
        (model for model in real_models.REAL_MODELS if model.name == document["model"]), None
    )
    if model is None:
        raise DatasetError(f"no published real model is called '{str(document['model'])[:60]}'")
    batch_size, side = row.job.batch_size, model.image_size
    options = TraceOptions(
        optimizer=model.optimizer,
        loss="cross_entropy",
        keeps_names=True,
        last_batch_size=model.last_batch_size(batch_size),
    )
    images = torch.empty(batch_size, 3, side, side, device="meta")
    return Subject(
        row,
        real_models.build(model),
        inputs_from_example(images, None),
        options,
        Platform(device=device),
    )
