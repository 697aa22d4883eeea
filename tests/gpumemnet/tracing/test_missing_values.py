"""Models that need values which a trace does not have: guessed with a note of operator and line, or
refused with both."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from gpumemnet.errors import ExtractError
from gpumemnet.tracing import TraceAnswer, trace

EXAMPLES = Path(__file__).parent / "examples"


@cache
def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"trace_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def traced(source: str, *arguments: str) -> TraceAnswer:
    file, _, factory = source.partition(":")
    model, inputs, *loss = getattr(example(file), factory)(*arguments)
    return trace(model, inputs, **({"loss": loss[0]} if loss else {}))


def refusal(source: str, *arguments: str) -> str:
    with pytest.raises(ExtractError) as raised:
        traced(source, *arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def line_of(file: str, text: str) -> int:
    """Number of the one line of an example that holds ``text``."""
    found = [
        number
        for number, line in enumerate((EXAMPLES / f"{file}.py").read_text().splitlines(), 1)
        if text in line
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("source", "how", "operator", "line", "guess"),
    [
        ("values:reads", "item", "Tensor.item", "x.abs().max().item()", "be 1."),
        ("values:reads", "branch", "Tensor.__bool__", "if x.sum() > 0", "be true."),
        ("values:reads", "checked", "Tensor.__bool__", "if (x < 0).any()", "be false."),
        ("values:reads", "length", "Tensor.__int__", "longest = int(", "be 1."),
        ("values:reads", "rows", "Tensor.tolist", ".tolist()[0]", "give 8 ones."),
        ("values:reads", "numpy", "Tensor.numpy", ".numpy()", "give 32 ones."),
        ("shapes:picks", "nonzero", "nonzero", ".nonzero()", "find all 64 elements."),
        ("shapes:picks", "mask", "", "return x[x > 0]", "pick all 16,384 elements of its mask."),
        ("shapes:picks", "where", "", "torch.where(", "find all 16,384 elements."),
        (
            "shapes:picks",
            "masked_select",
            "masked_select",
            "torch.masked_select(",
            "keep all 16,384 elements.",
        ),
        ("shapes:picks", "unique", "unique", "torch.unique(", "find all 64 elements different."),
        ("shapes:picks", "repeat", "repeat_interleave", "repeat_interleave(", "element once."),
        ("shapes:picks", "counts", "bincount", "torch.bincount(", "find values below 64."),
        (
            "operators:calls",
            "scale",
            "trace_example.scale",
            "scale(x, 2.0)",
            "like its first, of shape [64, 256].",
        ),
        (
            "operators:calls",
            "rotate",
            "trace_example.rotate_",
            "trace_example.rotate_(",
            "allocate nothing",
        ),
        (
            "operators:calls",
            "keep",
            "trace_example.keep",
            "x + keep(",
            "like its first, of shape [64, 256].",
        ),
        (
            "operators:calls",
            "squash",
            "trace_example.squash",
            "x + squash(",
            "like its first, of shape [64, 256].",
        ),
    ],
)
def test_a_note_names_the_operator_the_line_and_the_guess(
    source: str, how: str, operator: str, line: str, guess: str
) -> None:
    file = source.partition(":")[0]
    place = f"{file}.py line {line_of(file, line)}, in "
    notes = [note for note in traced(source, how).notes if place in note and guess in note]
    assert len(notes) == 1
    assert operator in notes[0]


def test_where_nothing_can_be_guessed_the_line_is_named() -> None:
    line = line_of("operators", "ops.trace_example.split(")
    assert f"operators.py line {line}, in split" in refusal("operators:calls", "split")


def test_a_loop_that_waits_for_another_answer_ends() -> None:
    sentence = refusal("values:reads", "loop")
    assert f"values.py line {line_of('values', 'while largest')}" in sentence
    assert "was taken to be true 10,000 times" in sentence


def test_what_goes_to_the_host_is_no_obstacle_but_noted() -> None:
    answer = traced("values:reads", "host")
    place = f"values.py line {line_of('values', 'penalty = ')}"
    assert len(answer.notes) == 2  # and what lives until the next step
    assert place in answer.notes[1]
    assert answer.notes[1].endswith("are counted as if they were on the GPU.")


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            "per_sample",
            r"the loss per_sample \(.*losses\.py line \d+\) must be a scalar, not a tensor of shape 6x4: reduce it",
        ),
        (
            "detached",
            r"the loss detached \(.*losses\.py line \d+\) does not depend on any parameter",
        ),
        (
            "wrong",
            r"the loss fails: .*losses\.py line \d+, in wrong: ValueError: Expected.*; inputs: 6x8$",
        ),
        ("triplet", r"loss: the target of TripletMarginLoss is unknown"),
    ],
)
def test_a_loss_that_is_none_is_said_with_its_line(loss: str, sentence: str) -> None:
    with pytest.raises(ExtractError, match=sentence):
        traced("losses:with_loss", loss)


def test_losses_of_torch_get_targets() -> None:
    by_class, by_value = (
        traced("losses:with_loss", "cross_entropy"),
        traced("losses:with_loss", "mse"),
    )
    assert (by_class.loss, by_value.loss) == ("CrossEntropyLoss", "MSELoss")
    assert by_class.parts["input"] == 6 * 8 * 4 + 6 * 8
    assert by_value.parts["input"] == 6 * 8 * 4 + 6 * 4 * 4


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "losses:says",
            "loss: the model's output holds no tensor; give a function of the output that returns a scalar",
        ),
        (
            "losses:fixed",
            "the model has no parameter that requires a gradient: nothing would be trained",
        ),
        (
            "losses:frozen",
            "the model has no parameter that requires a gradient: nothing would be trained",
        ),
        ("factories:mismatched", "the forward pass fails: "),
    ],
)
def test_models_that_cannot_be_trained(source: str, sentence: str) -> None:
    assert sentence in refusal(source)


def test_triton_kernels_are_launched_without_a_gpu() -> None:
    pytest.importorskip("triton")
    answer = traced("triton_model:build")
    assert answer.parts["saved_activation"] >= 0
    assert len(answer.notes) == 1  # what lives until the next step
