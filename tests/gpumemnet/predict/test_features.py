"""The feature vector: the same alone and among others, and physics that can be done by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.allocator.settings import LARGE_SEGMENT_BYTES
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics import closed_form
from gpumemnet.physics.optimizers import FACTORED_FILTERS
from gpumemnet.physics.step_memory import SIZE_CLASSES
from gpumemnet.predict import features as vector
from gpumemnet.predict.features import (
    FEATURE_COLUMNS,
    FEATURE_NAMES,
    LAYER_COLUMNS,
    TOTAL_COLUMNS,
    feature_matrix,
)
from gpumemnet.units import MIB
from tests.jobs import jobs, small_job, totals_only

WORKSPACE = 8_519_680
TOTALS = len(TOTAL_COLUMNS)


def column(job: TrainingJob, name: str) -> float:
    return float(feature_matrix(JobTable.from_jobs([job]), WORKSPACE)[0, FEATURE_NAMES.index(name)])


def by_size(job: TrainingJob, part: str) -> float:
    """All size classes together."""
    return sum(column(job, f"{part}_{size}_bytes") for size in SIZE_CLASSES)


@given(st.lists(jobs(), max_size=20))
def test_a_job_has_the_same_features_alone_and_among_others(many: list[TrainingJob]) -> None:
    together = feature_matrix(JobTable.from_jobs(many), WORKSPACE)
    assert together.shape == (len(many), len(FEATURE_COLUMNS))
    for row, job in zip(together, many, strict=True):
        np.testing.assert_array_equal(
            feature_matrix(JobTable.from_jobs([job]), WORKSPACE)[0, TOTALS:], row[TOTALS:]
        )
        np.testing.assert_array_equal(
            feature_matrix(JobTable.from_jobs([job]), WORKSPACE)[0, :TOTALS], row[:TOTALS]
        )


def test_many_layers_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled closed form lets no other thread run, so that a call must not compute too many
    layers."""
    jobs_in_calls: list[int] = []

    def fill(*arguments: Any) -> None:
        jobs_in_calls.append(len(arguments[3]))
        closed_form.fill_columns(*arguments)

    table = JobTable.from_jobs(
        [totals_only(small_job()), *[small_job()] * 7, totals_only(small_job())]
    )
    whole = feature_matrix(table, WORKSPACE)
    layers = len(small_job().layers)
    monkeypatch.setattr(vector, "fill_columns", fill)
    for most, calls in ((layers - 1, [1] * 9), (2 * layers, [3, 2, 2, 2]), (100 * layers, [9])):
        jobs_in_calls.clear()
        monkeypatch.setattr(vector, "_LAYERS_AT_ONCE", most)
        np.testing.assert_array_equal(feature_matrix(table, WORKSPACE), whole)
        assert jobs_in_calls == calls


def test_attention_weights_of_one_job_are_nothing_to_the_next() -> None:
    ends = small_job(
        attention_kernel="math", layers=(Layer("linear", 64, 640), Layer("softmax", 64))
    )
    begins = [
        small_job(
            attention_kernel="math",
            precision="amp_fp16",
            layers=(Layer(kind, 64, parameters), Layer("linear", 64, 640)),
        )
        for kind, parameters in (("linear", 640), ("dropout", 0), ("matmul", 0))
    ]
    many = [ends, *begins, ends]
    together = feature_matrix(JobTable.from_jobs(many), WORKSPACE)
    for row, job in zip(together, many, strict=True):
        np.testing.assert_array_equal(feature_matrix(JobTable.from_jobs([job]), WORKSPACE)[0], row)


def test_identities_are_counted_and_take_no_memory() -> None:
    rotation = ("multiply", "other", "concatenate", "multiply", "add")
    kinds = ("linear", *rotation, "attention", "add", "linear", "relu", "linear", "add")
    plain = tuple(Layer(kind, 64, 4160 if kind == "linear" else 0) for kind in kinds)
    padded = tuple(each for layer in plain for each in (layer, Layer("identity", 64)))
    options = {"precision": "amp_fp16", "checkpointing": "every_block"}
    rows = feature_matrix(
        JobTable.from_jobs([small_job(layers=layers, **options) for layers in (plain, padded)]),
        WORKSPACE,
    )
    differ = {
        FEATURE_NAMES[column]
        for column in range(TOTALS, len(FEATURE_NAMES))
        if rows[0, column] != rows[1, column]
    }
    assert differ == {"layer_count", "activation_count"}


@given(jobs())
def test_totals_only_leaves_the_layer_columns_empty(job: TrainingJob) -> None:
    full, bare = (
        feature_matrix(JobTable.from_jobs([job]), WORKSPACE)[0],
        feature_matrix(JobTable.from_jobs([totals_only(job)]), WORKSPACE)[0],
    )
    totals = len(FEATURE_COLUMNS) - len(LAYER_COLUMNS)
    np.testing.assert_array_equal(full[:totals], bare[:totals])
    assert not bare[totals:].any()


@pytest.mark.parametrize(
    ("optimizer", "precision", "weights", "gradients", "state"),
    [
        ("sgd", "fp32", 4, 4, 0),
        ("sgd_momentum", "fp32", 4, 4, 4),
        ("adam", "fp32", 4, 4, 8),
        ("adamw", "tf32", 4, 4, 8),
        ("adam", "bf16", 2, 2, 4),
        ("adam", "amp_bf16", 6, 4, 8),  # autocast keeps a half copy of the weights
        ("rmsprop", "amp_fp16", 6, 4, 4),
    ],
)
def test_bytes_per_parameter(
    optimizer: str, precision: str, weights: int, gradients: int, state: int
) -> None:
    job = small_job(optimizer=optimizer, precision=precision)
    per_parameter = [
        column(job, name) / job.total_parameters  # type: ignore[operator]
        for name in ("weight_bytes", "gradient_bytes", "optimizer_state_bytes")
    ]
    assert per_parameter == pytest.approx([weights, gradients, state])


@pytest.mark.parametrize(
    ("size_mib", "size_class", "packed_mib"),
    [
        *[
            (0.5, "small", 0.5),
            (1, "small", 1),
            (1.5, "medium", 20 / 13),
            (7, "medium", 10),
            (9.9, "medium", 10),
        ],
        *[
            (10, "large", 10),
            (11, "large", 12),
            (20, "huge", 20),
            (41, "huge", 42),
            (1279, "huge", 1280),
            (5000, "huge", 5000),
        ],
    ],
)
def test_a_tensor_costs_its_share_of_the_segments(
    size_mib: float, size_class: str, packed_mib: float
) -> None:
    job = small_job(layers=(Layer("embedding", 10, int(size_mib * MIB / 4)),))
    assert column(job, f"weights_{size_class}_bytes") / MIB == pytest.approx(packed_mib, rel=1e-5)
    assert by_size(job, "weights") / MIB == pytest.approx(packed_mib, rel=1e-5)


@given(st.integers(1, 2**38))
def test_segments_hold_what_is_packed_into_them(count: int) -> None:
    cost = by_size(small_job(layers=(Layer("embedding", 10, count),)), "weights")
    assert 4 * count <= cost <= max(8 * count, 512) + LARGE_SEGMENT_BYTES


def test_closed_form_of_one_layer_by_hand() -> None:
    # One linear layer of 1,024 × 1,024: weight 4 MiB (five fill a segment), bias 4 KiB; batch
    # 1,024: input and output 4 MiB.
    job = small_job(
        batch_size=1024, input_elements=1024, layers=(Layer("linear", 1024, 1024 * 1024 + 1024),)
    )
    small, medium = column(job, "weights_small_bytes"), column(job, "weights_medium_bytes")
    assert [small / MIB, medium / MIB] == pytest.approx([4 / 1024, 4.0])
    # Adam's step: weight, gradient, two moments and the foreach temporary, of the bias as well, the
    # input, and the output's name.
    assert column(job, "step_bytes") / MIB == pytest.approx(5 * (4.0 + 4 / 1024) + 4.0 + 4.0)
    # At the loss: weight, two moments, input; the output, its log-probabilities and both their
    # gradients.
    assert column(job, "peak_medium_bytes") / MIB == pytest.approx(3 * 4.0 + 4.0 + 4 * 4.0)
    assert column(job, "largest_weight_bytes") == (1024 * 1024 + 1024) * 4
    assert column(job, "resident_bytes") / MIB == pytest.approx(3 * (4.0 + 4 / 1024) + 4.0)


def test_what_is_kept_for_backward_follows_the_kind() -> None:
    def kept_mib(*kinds: str, **options: str) -> float:
        chain = (Layer("linear", 2**20, 2**20), *(Layer(kind, 2**20, 0) for kind in kinds))
        job = small_job(batch_size=4, input_elements=8, layers=chain, **options)
        return by_size(job, "kept") / MIB

    assert kept_mib("add") == 0  # an addition keeps nothing
    assert kept_mib("relu", "add") == 16  # relu keeps its result
    assert kept_mib("gelu") == 16  # gelu keeps its input
    assert kept_mib("relu", "gelu") == 16  # … and shares it with the relu before
    assert kept_mib("dropout", "add") == pytest.approx(4)  # a mask of one byte an element
    assert kept_mib("relu", "identity", "gelu") == 16  # an identity is no tensor
    # autocast: the norm raises what the linear layer gave in half, and the next linear layer lowers
    # the norm's output again
    halves = 512 / MIB  # the input of 8 elements, in half: a block
    assert kept_mib("layer_norm", "linear", precision="amp_bf16") == pytest.approx(
        halves + 16 + 10
    )  # 8 MiB cost 10
    # the math kernel keeps attention weights in fp32
    assert kept_mib(
        "matmul", "softmax", "matmul", precision="bf16", attention_kernel="math"
    ) == pytest.approx(10 + 16)


def test_frozen_layers_keep_nothing() -> None:
    chain = tuple(
        Layer(kind, 2**20, parameters)
        for kind, parameters in (("linear", 10), ("relu", 0), ("linear", 30), ("relu", 0))
    )
    every, last = (
        by_size(job, "kept") / MIB
        for job in (
            small_job(batch_size=4, input_elements=8, layers=chain, trainable_parameters=rest)
            for rest in (40, 30)
        )
    )
    assert every == pytest.approx(32)  # both results
    assert last == pytest.approx(
        32 - 16 + 16
    )  # the first one only because the trained layer needs its input


def test_rotations_keep_what_attention_reads_and_nothing_else() -> None:
    wide = 2**20
    projections = tuple(Layer("linear", wide, 8) for _ in range(3))
    rotated = tuple(
        Layer(kind, wide) for kind in ("multiply", "other", "concatenate", "multiply", "add")
    )
    chain = (*projections, *rotated, *rotated, Layer("attention", wide), Layer("linear", wide, 8))
    job = small_job(batch_size=4, input_elements=8, layers=chain)
    # values, turned queries, turned keys, and attention's result
    assert by_size(job, "kept") / MIB == pytest.approx(4 * 16)
    # under autocast a residual sum is fp32, a rotation's is as its halves are: what is kept is half
    # as large, and three casts
    halves = small_job(
        batch_size=4,
        input_elements=8,
        layers=(Layer("embedding", wide, 8), *chain),
        precision="amp_bf16",
    )
    assert by_size(halves, "kept") / MIB == pytest.approx(4 * 10 + 3 * 10)


def test_narrower_keys_and_values_change_nothing_for_queries() -> None:
    wide, narrow = 2**20, 2**18

    def rotated(width: int) -> tuple[Layer, ...]:
        halves = Layer("multiply", width), Layer("other", width // 2), Layer("concatenate", width)
        return *halves, Layer("multiply", width), Layer("add", width)

    projections = Layer("linear", wide, 8), Layer("linear", narrow, 8), Layer("linear", narrow, 8)
    chain = (
        *projections,
        *rotated(wide),
        *rotated(narrow),
        Layer("attention", wide),
        Layer("linear", wide, 8),
    )
    job = small_job(batch_size=16, input_elements=8, layers=chain)
    assert by_size(job, "kept") / MIB == pytest.approx(
        64 + 16 + 16 + 64
    )  # queries, keys, values, the result


def test_the_output_is_there_once() -> None:
    block = (Layer("linear", 2**20, 8), Layer("add", 2**20))
    plain, recomputed = (
        column(
            small_job(batch_size=16, input_elements=8, layers=(*block, *block), checkpointing=how),
            "loss_bytes",
        )
        / MIB
        for how in ("none", "every_block")
    )
    assert recomputed == pytest.approx(
        64 + 64 + 3 * 64
    )  # what the first block leaves; the output; the loss
    assert plain == pytest.approx(64 + 64 + 3 * 64)  # the second block's input; the same


def test_a_norm_that_is_written_out_keeps_its_input_in_fp32_and_what_it_weighs() -> None:
    wide = 2**20
    fused = (Layer("linear", wide, 8), Layer("rms_norm", wide, 8), Layer("linear", wide, 8))
    written = (
        Layer("linear", wide, 8),
        Layer("rms_norm", wide),
        Layer("multiply", wide, 8),
        Layer("linear", wide, 8),
    )
    for precision, more_mib in (
        ("fp32", 64),
        ("bf16", 32 + 32),
    ):  # half as much normalised, the input twice as large
        kept = [
            by_size(
                small_job(batch_size=16, input_elements=8, layers=chain, precision=precision),
                "kept",
            )
            / MIB
            for chain in (fused, written)
        ]
        assert kept[1] - kept[0] == pytest.approx(more_mib)


def test_a_tied_weight_has_two_gradients_for_a_moment() -> None:
    def peak(parameters: int) -> float:
        chain = (
            Layer("embedding", 64, 2**22),
            Layer("linear", 64, 64 * 65),
            Layer("linear", 2**16, parameters),
        )
        return by_size(small_job(batch_size=1, optimizer="sgd", layers=chain), "peak") / MIB

    tied, untied = peak(0), peak(2**22)
    # weight and two gradients; without tying, two weights, each with a gradient
    assert tied == pytest.approx(3 * 16, abs=2)
    assert untied == pytest.approx(4 * 16, abs=2)


def test_weights_by_channel_share_what_relu_has_kept() -> None:
    def kept(kind: str) -> float:
        wide, narrow = 2**20, 64
        chain = (
            *(
                Layer("conv2d", wide, 8),
                Layer(kind, wide),
                Layer("adaptive_avg_pool", narrow),
                Layer("conv2d", narrow, 8),
            ),
            *(Layer("sigmoid", narrow), Layer("multiply", wide), Layer("conv2d", wide, 8)),
        )
        return round(by_size(small_job(batch_size=4, input_elements=8, layers=chain), "kept") / MIB)

    assert kept("relu") == 2 * 16  # its result and the product
    assert kept("silu") == 3 * 16  # its input as well


@pytest.mark.parametrize(
    ("optimizer", "sizes_mib", "temporary_mib"),
    [
        *(("sgd", (48, 12), 0), ("sgd_momentum", (48, 12), 0)),
        *(
            ("adam", (48, 12), 96),
            ("adam", (12, 48), 108),
            ("adamw", (48, 48), 144),
        ),  # the one before keeps its last result
    ],
)
def test_a_loop_has_temporaries_of_one_parameter(
    optimizer: str, sizes_mib: tuple[int, ...], temporary_mib: int
) -> None:
    chain = tuple(Layer("embedding", 64, size * MIB // 4) for size in sizes_mib)
    loop, fused = (
        column(
            small_job(optimizer=optimizer, optimizer_implementation=implementation, layers=chain),
            "step_bytes",
        )
        / MIB
        for implementation in ("for_loop", "fused")
    )
    assert loop - fused == pytest.approx(temporary_mib)


def test_recomputed_blocks_leave_their_last_output() -> None:
    block = (
        Layer("layer_norm", 2**20, 8),
        Layer("linear", 2**22, 8),
        Layer("gelu", 2**22),
        Layer("linear", 2**20, 8),
    )
    chain = (
        Layer("linear", 2**20, 8),
        *(6 * (*block, Layer("add", 2**20))),
        Layer("linear", 10, 10),
    )
    peaks = {
        checkpointing: by_size(job, "peak") / MIB
        for checkpointing in ("none", "every_block")
        for job in [
            small_job(
                batch_size=4,
                input_elements=8,
                optimizer="sgd",
                layers=chain,
                checkpointing=checkpointing,
            )
        ]
    }
    # without, each block keeps the norm's input and output, and gelu's input and output: 2 · 16 + 2
    # · 64 MiB
    assert peaks["none"] > 6 * 160
    # with, each leaves 16; one is there as a whole, with the gradients of two wide outputs
    assert peaks["every_block"] < 6 * 16 + 160 + 3 * 64


def test_stages_of_convolutions_before_the_first_attention_are_blocks() -> None:
    block = (
        Layer("layer_norm", 2**20, 8),
        Layer("linear", 2**22, 8),
        Layer("gelu", 2**22),
        Layer("linear", 2**20, 8),
    )
    stages = (Layer("linear", 2**20, 8), *(6 * (*block, Layer("add", 2**20))))
    attention = (
        Layer("layer_norm", 2**20, 8),
        Layer("multihead_attention", 2**20, 8),
        Layer("add", 2**20),
    )
    without, hybrid = (
        small_job(
            batch_size=4,
            input_elements=8,
            optimizer="sgd",
            layers=(*layers, head),
            checkpointing="every_block",
        )
        for head in [Layer("linear", 10, 10)]
        for layers in (stages, (*stages, *attention))
    )
    assert column(hybrid, "block_count") == column(without, "block_count") + 1
    assert by_size(hybrid, "peak") < by_size(without, "peak") + 160 * MIB


def test_frozen_parameters_need_no_gradient() -> None:
    assert column(small_job(trainable_parameters=0), "gradient_bytes") == 0
    assert column(small_job(trainable_parameters=0), "peak_small_bytes") < column(
        small_job(), "peak_small_bytes"
    )


@pytest.mark.parametrize(
    ("batch_size", "large_mib"),
    [
        (
            4,
            5 * 12,
        ),  # at the step: weights, gradients, two moments, and a temporary that nothing was there for
        (256, 5 * 12),  # outputs of 3 MiB have left segments that are too small for it
        (4096, 4 * 12),  # outputs of 48 MiB have left larger ones
    ],
)
def test_a_step_takes_what_larger_tensors_have_left(batch_size: int, large_mib: int) -> None:
    job = small_job(
        batch_size=batch_size,
        input_elements=16,
        layers=(Layer("linear", 3072, 1024 * 3072 + 3072),),
    )
    assert column(job, "peak_large_bytes") / MIB == large_mib


CHANNELS, PIXELS = 64, 1024
DENSE, DEPTHWISE = 9 * CHANNELS * CHANNELS, 9 * CHANNELS
PLANE_BYTES = 1024 * CHANNELS * PIXELS * 2
"""An activation of a batch of 1,024 in half precision: 128 MiB, a segment of its own."""


def convolutions(weights: int, **options: object) -> TrainingJob:
    """Two convolutions, the second of which is in question, each with a norm."""
    layers = (
        *(
            Layer("conv2d", CHANNELS * PIXELS, 27 * CHANNELS),
            Layer("batch_norm2d", CHANNELS * PIXELS, 2 * CHANNELS),
        ),
        *(
            Layer("conv2d", CHANNELS * PIXELS, weights),
            Layer("batch_norm2d", CHANNELS * PIXELS, 2 * CHANNELS),
        ),
    )
    plain = {
        "layers": layers,
        "family": "cnn",
        "batch_size": 1024,
        "input_elements": 3 * PIXELS,
        "precision": "bf16",
        "optimizer": "sgd",
    }
    return small_job(**{**plain, **options})


@pytest.mark.parametrize(
    ("weights", "options", "planes"),
    [
        # Image and result are copied into the layout that tensor cores read; without copies the
        # moment of the norm behind is fuller, by one plane.
        (DENSE, {}, 2 - 1),
        (
            DENSE,
            {"precision": "fp32"},
            2 * (2 - 1),
        ),  # as TF32, which PyTorch lets convolutions use: four bytes each
        (DEPTHWISE, {}, 0),  # no tensor cores
    ],
)
def test_convolutions_copy_what_lies_otherwise(
    weights: int, options: dict[str, object], planes: int
) -> None:
    job = convolutions(weights, **options)
    copies = column(job, "unfragmented_bytes") - column(
        convolutions(weights, **options, channels_last=True), "unfragmented_bytes"
    )
    assert copies == pytest.approx(planes * PLANE_BYTES, abs=3 * MIB)  # and of the weights


@pytest.mark.parametrize(("precision", "planes"), [("bf16", 1), ("fp32", 0)])
def test_a_first_layer_copies_its_result_at_most(precision: str, planes: int) -> None:
    """Its image of three channels is padded in either layout; TF32 does not take it."""
    first = (
        Layer("conv2d", CHANNELS * PIXELS, 27 * CHANNELS),
        Layer("adaptive_avg_pool2d", CHANNELS),
        Layer("linear", 10, 650),
    )
    images = {"layers": first, "precision": precision}
    amounts = [
        column(convolutions(DENSE, **images, channels_last=last), "unfragmented_bytes")
        for last in (False, True)
    ]
    assert amounts[0] - amounts[1] == pytest.approx(planes * PLANE_BYTES, abs=MIB)
    if planes:
        padded = amounts[1] - column(
            convolutions(
                DENSE, **{**images, "layers": (Layer("linear", *first[0][1:]), *first[1:])}
            ),
            "unfragmented_bytes",
        )
        assert padded == pytest.approx(8 * 1024 * PIXELS * 2, abs=2 * MIB)


def test_adafactor_keeps_a_row_and_a_column_of_every_filter() -> None:
    wide = 256 * MIB
    for kind, copies in (
        ("conv2d", FACTORED_FILTERS),
        ("linear", 0.0),
    ):  # of a wide matrix it is next to nothing
        resident = [
            column(small_job(layers=(Layer(kind, 64, wide),), optimizer=name), "resident_bytes")
            for name in ("sgd_momentum", "adafactor")
        ]
        assert resident[0] - resident[1] == pytest.approx((1.0 - copies) * 4 * wide, rel=1e-3)
