"""Loads the datasets that options name; what is wrong with one becomes an error that says what to
do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpumemnet.errors import DatasetError

if TYPE_CHECKING:
    from ..training.data import LabelledJobs

_PUBLISHED_HINT: Final = (
    "for the published A100 measurements, download Datasets/MLP/mlp_data_step2.csv of github.com/itu-rad/GPUMemNet (CC BY 4.0) "
    "and run  python -m research import-published mlp_data_step2.csv --out"
)


def load(dataset: Path, family: str) -> LabelledJobs:
    """Returns the labelled jobs of one family in the file ``dataset``.

    Raises:
        DatasetError: when there is no such file, or no such job in it.
    """
    if not dataset.is_file():
        raise DatasetError(
            f"{dataset} does not exist: measure one with gpumemnet build measure; {_PUBLISHED_HINT} {dataset}"
        )
    import torch

    from ..training.data import load_labelled_jobs

    torch.set_num_threads(1)  # the networks are too small for a second thread to pay
    return load_labelled_jobs(dataset, family)


def load_all(datasets: list[Path]) -> LabelledJobs:
    """Returns the jobs of all families of several datasets together.

    Raises:
        DatasetError: when a dataset cannot be read, or all jobs are of one family.
    """
    from ..training.data import joined

    data = joined(list(load_by_family(datasets).values()))
    if len(data.families) == 1:
        raise DatasetError(
            f"{datasets[0]} has {data.family} jobs only: the common classifier learns from several families"
        )
    return data


def load_by_family(datasets: list[Path]) -> dict[str, LabelledJobs]:
    """Returns family → its labelled jobs; a dataset may have several families.

    Raises:
        DatasetError: when a dataset cannot be read, or two have jobs of one family.
    """
    found: dict[str, LabelledJobs] = {}
    for path in datasets:
        families = _families(path)
        if not found.keys().isdisjoint(families):
            raise DatasetError(
                f"{path} has jobs of a family that another dataset has too: merge them first"
            )
        found |= {family: load(path, family) for family in families}
    return found


def _families(dataset: Path) -> list[str]:
    if not dataset.is_file():
        raise DatasetError(f"{dataset} does not exist: measure one with gpumemnet build measure")
    from ..training.data import labelled_families

    return labelled_families(dataset)


@contextmanager
def split_errors(dataset: Path) -> Iterator[None]:
    """Turns too few architectures to split into an error about the dataset."""
    try:
        yield
    except ValueError as error:
        raise DatasetError(f"{dataset}: {error}") from None
