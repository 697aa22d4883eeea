"""Turns GPUMemNet's published tables into a dataset, and finds what rebuilds a row's network."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from dataset_builder.families import TensorSpec
from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.job.dataset import write_dataset
from gpumemnet.job.measurement import Measurement
from research.published_tables import cnn, mlp, transformer
from research.published_tables.rows import WHERE_TO_GET_IT, LeftOutError, Row

if TYPE_CHECKING:
    from torch import Tensor, nn

_HOMES: Final[Mapping[str, str]] = {
    "mlp": ".mlp",
    "cnn": ".cnn",
    "transformer": ".transformer",
}


class Rebuilds(Protocol):
    """The functions of a family (:mod:`dataset_builder.families`) that rebuilding a row's network
    needs."""

    def parse(self, document: Mapping[str, Any]) -> Any:
        """The architecture from the row's JSON object; ``DatasetError`` on anything else."""
        ...

    def build(self, architecture: Any) -> nn.Module:
        """The network, on torch's current default device."""
        ...

    def tensors(self, architecture: Any) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
        """The inputs of the forward pass, and the targets of the loss."""
        ...

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The training loss of the network's outputs."""
        ...


def published_family(measurement: Measurement) -> Rebuilds:
    """The module that rebuilds the network of a published row.

    Raises:
        DatasetError: when the row is not published, or is a real model's, whose architecture holds
            only its name.
    """
    if measurement.provenance != "published":
        raise DatasetError(f"the row is {measurement.provenance}, not published")
    if measurement.recipe in ("zoo", "timm", "xmem"):
        raise DatasetError(
            "a published real model is not rebuilt from its row: benchmarks/real_models.py or python -m research import-real-runs traces it"
        )
    return cast(Rebuilds, import_module(_HOMES[measurement.job.family], __package__))


def import_published(
    source: str | Path, out: str | Path, left_out: Counter[str] | None = None
) -> int:
    """Write the dataset of the published measurements to ``out``; returns the number of rows.

    Args:
        source: the published table.
        out: the file to write.
        left_out: counts the rows whose network cannot be rebuilt, by reason.

    Raises:
        DatasetError: when the file is missing or is another table; names the line and what is wrong
            with it.
    """
    return write_dataset(out, read_published(source, left_out))


def read_published(
    source: str | Path, left_out: Counter[str] | None = None
) -> Iterator[Measurement]:
    """The published measurements, in the order of the file.

    Raises:
        DatasetError: as :func:`import_published`.
    """
    path = Path(source)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            measurement_of_row = _reader_of(path, reader.fieldnames or ())
            for row in reader:
                try:
                    yield measurement_of_row(row)
                except LeftOutError as error:
                    if left_out is not None:
                        left_out[str(error)] += 1
                except GpumemnetError as error:
                    raise DatasetError(f"{path}, line {reader.line_num}: {error}") from None
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist; {WHERE_TO_GET_IT}") from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path} is not CSV text: {error}") from None


def _reader_of(path: Path, columns: Sequence[str]) -> Callable[[Row], Measurement]:
    """The function that reads a row of the table with these columns."""
    if set(transformer.COLUMNS) <= set(columns):
        return transformer.measurement_of_row
    if set(cnn.COLUMNS) <= set(columns):
        return cnn.measurement_of_row
    missing = [name for name in mlp.COLUMNS if name not in columns]
    if missing:
        raise DatasetError(
            f"{path} is not the published table: it lacks the column '{missing[0]}'; {WHERE_TO_GET_IT}"
        )
    return mlp.measurement_of_row
