"""How inputs are written, and how they become meta tensors of the job's batch size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.extract.factory import DTYPES, inputs_from_specs, parse_input
from gpumemnet.extract.module_calls import inputs_from_example


@given(st.text(max_size=30))
def test_any_text_is_a_spec_or_one_clear_refusal(text: str) -> None:
    try:
        spec = parse_input(text)
    except InvalidRequestError as error:
        field, sentence = error.field, str(error)
    else:
        assert spec.dtype in DTYPES
        assert all(dimension > 0 for dimension in spec.shape)
        return
    assert field == "input"
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must look like"),
        ("3,224,224", "must look like"),
        ("3x-1", "must look like"),
        ("3x0x2", "above 0"),
        ("9" * 16, "at most"),
        ("9" * 400, "must look like"),
        ("4:float8", "dtype"),
        ("٣x٤", "must look like"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        parse_input(text)


def test_specs_become_positional_and_keyword_meta_tensors() -> None:
    inputs = inputs_from_specs([parse_input("3x4"), parse_input("mask=7:bool")], 5)
    assert [tuple(tensor.shape) for tensor in inputs.args] == [(5, 3, 4)]
    assert inputs.kwargs["mask"].shape == (5, 7)
    assert inputs.kwargs["mask"].dtype == torch.bool
    assert inputs.args[0].is_meta
    assert inputs.kwargs["mask"].all()  # as of samples without padding
    assert inputs.elements_per_sample == 19


def test_an_example_is_resized_where_it_has_the_batch_and_the_note_says_so() -> None:
    example = {
        "tokens": torch.zeros(2, 9, dtype=torch.long),
        "mask": torch.zeros(9, 9),
        "nested": (torch.zeros(2, 3), None),
        "k": 4,
    }
    inputs = inputs_from_example(example, 16)
    assert inputs.kwargs["tokens"].shape == (16, 9)
    assert inputs.kwargs["tokens"].dtype == torch.long
    assert inputs.kwargs["mask"].shape == (9, 9)
    assert inputs.kwargs["nested"][0].shape == (16, 3)
    assert inputs.kwargs["nested"][1] is None
    assert inputs.kwargs["k"] == 4
    assert inputs.batch_size == 16
    assert inputs.note == (
        "The factory's inputs hold 2 samples; at batch size 16, resized: tokens, nested input 0; kept as they are: mask."
    )
    same = inputs_from_example(example, None)
    assert (same.batch_size, same.note) == (2, "")


@pytest.mark.parametrize("example", [{}, (), {"scale": 1.0}, torch.tensor(3.0), None])
def test_inputs_without_a_batch_are_refused(example: object) -> None:
    with pytest.raises(ExtractError, match="no tensor has a batch dimension"):
        inputs_from_example(example, 4)
