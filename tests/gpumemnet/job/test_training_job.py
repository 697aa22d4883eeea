"""Jobs: what is valid, what is derived, and how a wrong value is named."""

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.json_codec import (
    job_from_dict,
    job_from_json,
    job_to_dict,
    job_to_json,
    read_jobs,
)
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import JOB_FIELDS, TrainingJob
from tests.jobs import jobs, small_job


@given(jobs())
def test_json_gives_the_same_job_back(job: TrainingJob) -> None:
    assert job_from_json(job_to_json(job)) == job
    assert job_from_dict(job_to_dict(job)) == job
    assert set(job_to_dict(job)) == set(JOB_FIELDS)


def test_totals_are_derived_from_the_layers() -> None:
    job = small_job()
    assert job.total_parameters == 51_712 + 1_024 + 5_130
    assert job.total_activations == 4 * 512 + 10
    assert job.trainable_parameters == job.total_parameters


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"batch_size": 0}, "batch_size", "between 1 and"),
        ({"batch_size": True}, "batch_size", "whole number, not true"),
        ({"batch_size": 10**40}, "batch_size", "a number of more than 24 digits"),
        ({"family": "rnn"}, "family", "must be one of mlp, cnn, transformer, not 'rnn'"),
        ({"channels_last": 1}, "channels_last", "must be true or false, not 1"),
        ({"schema_version": 2, "tensor_parallel": 8}, "schema_version", "upgrade gpumemnet"),
        ({"layers": [7]}, "layers[0]", "must be an object with kind"),
        ({"layers": [{"kind": "linear"}]}, "layers[0].activations", "is missing"),
        (
            {"layers": [{"kind": "Linear!", "activations": 1}]},
            "layers[0].kind",
            "lower-case layer kind",
        ),
        ({"total_parameters": 3}, "total_parameters", "the layers add up to 57866"),
        ({"trainable_parameters": 10**6}, "trainable_parameters", "more than the 57866 parameters"),
        ({"batchsize": 3}, "batchsize", "did you mean 'batch_size'?"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], field: str, says: str) -> None:
    document = {**job_to_dict(small_job()), **change}
    with pytest.raises(InvalidJobError) as caught:
        job_from_dict(document)
    assert caught.value.field == field
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(read_jobs([document]).errors[0]) == str(caught.value)


@pytest.mark.parametrize(
    "field", ["family", "batch_size", "input_elements", "optimizer", "precision"]
)
def test_a_missing_field_is_named(field: str) -> None:
    document = job_to_dict(small_job())
    del document[field]
    with pytest.raises(InvalidJobError, match=f"^{field}: is missing"):
        job_from_dict(document)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no valid JSON: EOF"),
        ("[1, 2]", "a job must be a JSON object, not a list"),
        ('{"batch_size": NaN}', "expected value at line 1 column 16"),
        ('{"batch_size": 1, "batch_size": 2}', "batch_size: appears twice"),
        ('{"batch_size": ' + "9" * 6000 + "}", "number out of range"),
        ("[" * 100_000, "recursion limit exceeded"),
        (b"\xff\xfe{", "no valid JSON"),
        (
            b"\xef\xbb\xbf[1, 2]",
            "a job must be a JSON object, not a list",
        ),  # what Windows writes before UTF-8
    ],
)
def test_text_that_is_no_job_is_explained(text: str | bytes, says: str) -> None:
    with pytest.raises(InvalidJobError, match=says.replace("[", r"\[")):
        job_from_json(text)


def test_a_layer_is_a_plain_value() -> None:
    layer = Layer("linear", 10, parameters=110)
    assert (
        repr(layer)
        == "Layer(kind='linear', activations=10, parameters=110, trains=None, block=None)"
    )
    assert {layer, Layer("linear", 10, 110)} == {layer}
    assert copy.deepcopy(layer) == pickle.loads(pickle.dumps(layer)) == layer
    assert type(pickle.loads(pickle.dumps(layer))) is Layer
    with pytest.raises(AttributeError):
        layer.activations = 11  # type: ignore[misc]
    with pytest.raises(InvalidJobError, match="parameters: must be between 0 and"):
        Layer("linear", 10, -1)
