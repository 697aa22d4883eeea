"""Adds to ``gpumemnet predict``: which GPUs hold a job, and the largest batch that fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpumemnet.cli.output import print_facts, print_table
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.gpu.verdict import VERDICT_TEXTS
from gpumemnet.predict.fits import Fit, fits, target
from gpumemnet.predict.largest_batch import BatchSizes, batch_sizes

if TYPE_CHECKING:
    from rich.console import Console

    from gpumemnet.job.training_job import TrainingJob
    from gpumemnet.predict.predictor import Predictor


def fitting(
    predictor: Predictor,
    job: TrainingJob,
    with_fits: bool,
    batch_target: str | None,
    **options: Any,
) -> tuple[tuple[Fit, ...] | None, BatchSizes | None]:
    """Finds the GPUs of the catalogue that hold a job, and its largest batches on ``batch_target``;
    ``None`` if not requested.

    Raises:
        InvalidRequestError: when the catalogue has no such GPU.
    """
    found = fits(predictor, job, **options) if with_fits else None
    sizes = (
        None
        if batch_target is None
        else batch_sizes(predictor, job, target(batch_target), **options)
    )
    return found, sizes


def fitting_document(found: Sequence[Fit] | None, sizes: BatchSizes | None) -> dict[str, Any]:
    """Returns the result of :func:`fitting` as a JSON object."""
    document: dict[str, Any] = {}
    if found is not None:
        document["fits"] = [asdict(fit) for fit in found]
    if sizes is not None:
        document["batch_sizes"] = asdict(sizes)
    return document


def show_fitting(found: Sequence[Fit] | None, sizes: BatchSizes | None, console: Console) -> None:
    """Prints the result of :func:`fitting` as tables."""
    if sizes is not None:
        target_name = sizes.gpu if sizes.mig is None else f"{sizes.gpu}, {sizes.mig}"
        facts = [
            ("GPU", f"{target_name}, {sizes.available_mib:,} MiB available"),
            (
                "safe",
                _batch_text(sizes.safe_batch, sizes)
                + f", covers {sizes.coverage:.4g} of such jobs",
            ),
            ("likely", _batch_text(sizes.likely_batch, sizes)),
            *(("outside", reason) for reason in sizes.reasons),
        ]
        print_facts(console, "Largest batch size", facts)
    if found is not None:
        rows = [
            (
                device_profile(fit.gpu).aliases[0] + (f"/{fit.mig}" if fit.mig else ""),
                fit.available_mib,
                fit.request_mib,
                "none" if fit.limit_mib is None else f"{fit.limit_mib:,}",
                VERDICT_TEXTS[fit.verdict],
                f"{fit.probability:.1%}",
            )
            for fit in found
        ]
        columns = ("GPU", "available MiB", "expected MiB", "safe MiB", "verdict", "likely")
        print_table(console, "What holds the job", columns, rows)


def _batch_text(batch: int | None, sizes: BatchSizes) -> str:
    if batch is None:
        return "none"
    return f"{batch:,} or more" if batch == sizes.max_batch else f"{batch:,}"
