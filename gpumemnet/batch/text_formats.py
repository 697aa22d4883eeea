"""Writes answers as lines of CSV or JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa


def csv_header(schema: pa.Schema) -> bytes:
    """The header line of a CSV file of answers."""
    return ",".join(schema.names).encode() + b"\n"


def csv_lines(batch: pa.RecordBatch) -> bytes:
    """Writes the answers as lines of CSV; nulls become empty cells."""
    from pyarrow import csv

    buffer = io.BytesIO()
    csv.write_csv(_plain(batch), buffer, csv.WriteOptions(include_header=False))
    return buffer.getvalue()


def json_lines(batch: pa.RecordBatch) -> bytes:
    """Writes the answers as JSON Lines."""
    if not len(batch):
        return b""
    template = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in batch.schema.names) + "}\n"
    columns = [_json_values(column.to_pylist()) for column in _plain(batch).columns]
    return "".join(map(template.__mod__, zip(*columns, strict=True))).encode()


def _json_values(values: list[Any]) -> list[str]:
    known: dict[Any, str] = {}
    for value in set(values):
        known[value] = json.dumps(value, ensure_ascii=False)
    return list(map(known.__getitem__, values))


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replaces dictionary columns by string columns."""
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


LINES: Final[dict[str, Callable[[pa.RecordBatch], bytes]]] = {"csv": csv_lines, "jsonl": json_lines}
