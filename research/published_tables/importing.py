"""Imports GPUMemNet's published measurements (one A100, CC BY 4.0) into the dataset's schema.

The tables are those of github.com/itu-rad/GPUMemNet (arXiv 2602.17817): MLPs, CNNs and
transformers, told apart by their columns. The label is the maximum of one-second ``nvidia-smi``
readings of the whole GPU, so the parts of the process are unknown.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.job.dataset import write_dataset
from gpumemnet.job.measurement import Measurement

from . import cnn, mlp, transformer
from .rows import WHERE_TO_GET_IT, LeftOutError, Row


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
