"""Jobs from Arrow columns are those that the one reader of documents makes, and odd rows are
refused with its sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.errors import DatasetError, InvalidJobError
from gpumemnet.job.arrow_codec import check_columns, read_arrow_jobs
from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import JOB_FIELDS, REQUIRED_FIELDS, TrainingJob
from tests.jobs import jobs, small_job
from tests.parquet_jobs import JOB_SCHEMA

ODD_NUMBERS = st.sampled_from([None, -1, 0, 2**31, 2**50 + 1, 2**62])
ODD_WORDS = st.sampled_from([None, "", "adam ", "linear", "Größe"])


def nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, field.type) for field in schema])


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of a table of jobs, some of them with something odd."""
    documents = [job_to_dict(job) for job in draw(st.lists(jobs(), min_size=1, max_size=8))]
    for document in documents:
        if draw(st.booleans()):
            name = draw(
                st.sampled_from(
                    [
                        name
                        for name in JOB_FIELDS
                        if name not in ("layers", "channels_last", "cudnn_benchmark")
                    ]
                )
            )
            is_word = pa.types.is_string(JOB_SCHEMA.field(name).type)
            document[name] = draw(ODD_WORDS if is_word else ODD_NUMBERS)
        if document["layers"] and draw(st.integers(0, 3)) == 0:
            name = draw(st.sampled_from(["kind", "activations", "parameters", "block"]))
            document["layers"][0][name] = draw(ODD_WORDS if name == "kind" else ODD_NUMBERS)
        if draw(st.integers(0, 5)) == 0:
            document["layers"] = draw(st.sampled_from([None, []]))
    return documents


def one_by_one(document: dict[str, Any]) -> TrainingJob | str:
    try:
        return job_from_dict({name: value for name, value in document.items() if value is not None})
    except InvalidJobError as error:
        return str(error)


def in_columns(batch: pa.RecordBatch) -> list[TrainingJob | str]:
    read = read_arrow_jobs(batch)
    found: dict[int, TrainingJob | str] = dict(zip(read.rows.tolist(), read.table, strict=True))
    found |= {row: str(error) for row, error in read.errors.items()}
    return [found[row] for row in range(batch.num_rows)]


@settings(max_examples=60)
@given(rows(), st.booleans(), st.integers(0, 3))
def test_columns_are_read_as_documents_are(
    documents: list[dict[str, Any]], as_dictionary: bool, cut: int
) -> None:
    batch = pa.RecordBatch.from_pylist(documents, nullable(JOB_SCHEMA))
    if as_dictionary:
        columns = [
            column.dictionary_encode() if pa.types.is_string(column.type) else column
            for column in batch.columns
        ]
        batch = pa.RecordBatch.from_arrays(columns, batch.schema.names)
    batch, documents = batch.slice(cut), documents[cut:]
    check_columns(batch.schema, "here")
    if documents:
        assert in_columns(batch) == [one_by_one(document) for document in documents]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.uint16(), pa.uint64()])
def test_whole_numbers_of_any_width(kind: pa.DataType) -> None:
    table = pa.table(
        {name: [value] for name, value in job_to_dict(small_job(batch_size=64)).items()},
        nullable(JOB_SCHEMA),
    )
    place = table.schema.get_field_index("batch_size")
    table = table.set_column(place, "batch_size", pa.array([64], kind))
    check_columns(table.schema, "here")
    assert in_columns(table.to_batches()[0]) == [small_job(batch_size=64)]


@pytest.mark.parametrize("form", ["large_list", "fixed", "sliced", "dictionary kinds"])
def test_layers_in_other_forms(form: str) -> None:
    many = [small_job(), replace(small_job(), layers=small_job().layers[::-1])]
    table = pa.Table.from_pylist([job_to_dict(job) for job in many], nullable(JOB_SCHEMA))
    layers = table.column("layers").combine_chunks()
    layer = layers.type.value_type
    if form == "large_list":
        layers = layers.cast(pa.large_list(layer))
    elif form == "fixed":
        layers = pa.FixedSizeListArray.from_arrays(layers.flatten(), 5)
    elif form == "sliced":
        layers = pa.concat_arrays([layers, layers]).slice(2)
    else:
        kinds, *amounts = layers.flatten().flatten()
        structure = pa.StructArray.from_arrays(
            [kinds.dictionary_encode(), *amounts], [*Layer._fields]
        )
        layers = pa.ListArray.from_arrays(layers.offsets, structure)
    table = table.set_column(table.schema.get_field_index("layers"), "layers", layers)
    check_columns(table.schema, "here")
    assert in_columns(table.combine_chunks().to_batches()[0]) == many


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("batch_size", pa.string(), "'batch_size' is string, and must hold whole numbers"),
        ("channels_last", pa.int8(), "'channels_last' is int8, and must hold true or false"),
        (
            "layers",
            pa.string(),
            "must hold lists of structures of kind, activations, parameters",
        ),
    ],
)
def test_a_column_of_another_type_is_refused_at_once(
    name: str, kind: pa.DataType, says: str
) -> None:
    fields = [
        pa.field(field.name, kind if field.name == name else field.type) for field in JOB_SCHEMA
    ]
    with pytest.raises(DatasetError, match=says):
        check_columns(pa.schema(fields), "jobs.parquet")


def test_a_column_that_is_missing_or_there_twice_is_named() -> None:
    for name in REQUIRED_FIELDS:
        with pytest.raises(DatasetError, match=f"the column '{name}' is missing"):
            check_columns(
                pa.schema([field for field in JOB_SCHEMA if field.name != name]), "jobs.parquet"
            )
    with pytest.raises(DatasetError, match="two columns called 'optimizer'"):
        check_columns(pa.schema([*JOB_SCHEMA, pa.field("optimizer", pa.string())]), "jobs.parquet")
