"""Labels the jobs of a recipe by tracing them, where no GPU is available.

A traced row says so in ``label_source`` and ``provenance``.  Its label is the memory that the trace
expects of the process, with the CUDA context of the GPU's profile.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from dataset_builder.measure.campaign import ProgressLine, Tally
from dataset_builder.measure.journal import Journal, Settings
from dataset_builder.recipe.planned_job import PlannedJob, parse_planned, training_job
from dataset_builder.recipe.recipe import Recipe
from dataset_builder.recipe.sampling import sample_jobs
from gpumemnet.errors import GpumemnetError
from gpumemnet.gpu.catalogue import DeviceProfile, context, device_profile
from gpumemnet.job.measurement import (
    TRACED,
    Measurement,
    measurement_from_dict,
    measurement_to_dict,
)
from gpumemnet.sandbox.workers import in_processes
from gpumemnet.tracing.timeline import STEADY_STEPS

from .subjects import traceable, traced_run

PROTOCOL: Final = "trace-8"
"""``trace-2`` since the trace follows PyTorch's CUDA code allocation by allocation
(``benchmarks/cuda_code.py``), ``trace-3`` since fp32 leaves convolutions the TF32 that PyTorch lets
them use, ``trace-4`` since the steady state is the answer and the replay knows the card's capacity,
``trace-5`` since workspaces of convolutions follow cuDNN's own answers, ``trace-6`` since they
follow published readings in fp32 on an A100 and after a search, ``trace-7`` since they shrink where
memory is short, ``trace-8`` since fp32 convolutions follow published readings on every GPU."""


def trace_recipe(
    recipe: Recipe, gpu: str, count: int, seed: int, folder: Path, workers: int | None
) -> None:
    """Label ``count`` jobs of ``recipe`` as on ``gpu`` in ``folder``; a later call continues where
    this one stopped.

    Raises:
        DatasetError: when the folder holds another campaign or cannot be written.
        InvalidRequestError: on an unknown GPU, or when the recipe does not hold so many jobs.
    """
    device = device_profile(gpu)
    with Journal(folder) as journal:
        settings = Settings(
            f"{recipe.name}, traced as on {device.name}", recipe.digest, seed, count
        )
        planned = journal.plan(settings)
        if planned is None:
            planned = sample_jobs(recipe, count, seed, device.capacity_bytes)
            journal.keep_plan(settings, planned)
        tally, line = Tally(count, len(journal.finished), time.monotonic()), ProgressLine()
        left = [job for job in planned if job.key not in journal.finished]
        tasks = [(job.to_dict(), job.key, recipe.name, seed, device.name) for job in left]
        try:
            for key, row in in_processes(_trace_planned, tasks, workers):
                measurement = measurement_from_dict(row)
                journal.append(key, measurement)
                tally.statuses[measurement.status] += 1
                line(tally)
        finally:
            line.close(tally)


def traced_measurement(
    planned: PlannedJob, recipe: str, seed: int, device: DeviceProfile
) -> Measurement:
    """One row whose label is the trace's expectation; above the card's memory it is ``oom``, as a
    run would be."""
    job = training_job(planned)
    row: dict[str, Any] = {
        "job": job,
        "label_source": TRACED,
        "capacity_bytes": device.capacity_bytes,
        "provenance": TRACED,
        "gpu": device.name,
        "recipe": recipe,
        "architecture": planned.architecture_json,
        "options": planned.options_json,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    start = time.monotonic()
    try:
        reserved = traced_run(*traceable(planned, job.attention_kernel, device)).reserved_bytes
    except GpumemnetError as error:
        return Measurement(**row, status="error", reason=str(error)[:500])
    context_bytes = context(device).expected_bytes
    fits = reserved + context_bytes <= device.capacity_bytes
    return Measurement(
        **row,
        status="ok" if fits else "oom",
        reason=None if fits else "the trace needs more than the card has",
        peak_process_bytes=reserved + context_bytes if fits else None,
        peak_reserved_bytes=reserved if fits else None,
        context_bytes=context_bytes,
        steps=STEADY_STEPS,
        seconds=time.monotonic() - start,
    )


def _trace_planned(
    document: dict[str, Any], key: str, recipe: str, seed: int, gpu: str
) -> tuple[str, dict[str, Any]]:
    measurement = traced_measurement(parse_planned(document), recipe, seed, device_profile(gpu))
    return key, measurement_to_dict(measurement)
