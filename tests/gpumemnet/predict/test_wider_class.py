"""Jobs beyond the training data: the closed form answers with the bound that was calibrated on real
networks."""

from dataclasses import replace
from typing import Any

import pytest

from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.predictor import Predictor

PREDICTOR = Predictor.default()
LAYERS = (
    Layer("embedding", 256 * 256, 30_000 * 256),
    Layer("lstm", 256 * 1024, 9_000_000),
    Layer("lstm", 256 * 1024 * 11),
    Layer("linear", 10, 10_250),
)
JOB = TrainingJob(
    family="mlp",
    batch_size=64,
    input_elements=256,
    sequence_length=256,
    optimizer="adam",
    precision="fp32",
    layers=LAYERS,
)


def test_layers_that_training_never_saw_get_a_limit_when_their_memory_is_known() -> None:
    answer = PREDICTOR.predict(JOB)
    assert answer.in_support
    assert answer.reasons == ()
    assert answer.safe_bytes is not None
    assert 1.05 < answer.safe_bytes / answer.expected_bytes < 2.5  # few such networks are known
    assert answer.probabilities.sum() == pytest.approx(1.0)
    twice = PREDICTOR.predict(replace(JOB, batch_size=128))
    assert twice.safe_bytes is not None
    assert twice.safe_bytes > answer.safe_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gradient_accumulation": 64}, "gradient_accumulation"),
        ({"layers": (*LAYERS, Layer("my_kernel", 10**7))}, "my_kernel"),
        ({"layers": (Layer("other", 10**6, 10**6),)}, "other"),
    ],
)
def test_where_nothing_is_known_there_is_no_limit(change: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {
        "total_activations": None,
        "total_parameters": None,
        "trainable_parameters": None,
        **change,
    }
    answer = PREDICTOR.predict(replace(JOB, **fields))
    assert answer.safe_bytes is None
    assert any(reason in words for words in answer.reasons)


def test_recomputed_blocks_get_a_wider_limit() -> None:
    size = 256 * 28 * 28
    block = (Layer("conv2d", size, 590_080), Layer("batch_norm2d", size, 512), Layer("relu", size))
    cnn = replace(
        JOB,
        family="cnn",
        input_elements=3 * 224 * 224,
        sequence_length=None,
        layers=(*block, Layer("add", size)) * 6,
        total_activations=None,
        total_parameters=None,
        trainable_parameters=None,
    )
    jobs = (replace(cnn, checkpointing=checkpointing) for checkpointing in ("none", "every_block"))
    kept, recomputed = (
        (answer.safe_bytes or 0) / answer.expected_bytes for answer in map(PREDICTOR.predict, jobs)
    )
    assert 1.0 < kept < recomputed


def test_logits_of_language_models_are_counted_again() -> None:
    """Libraries convert logits in half precision to fp32 for the loss, and a loss is no layer."""
    body = (
        Layer("embedding", 128 * 256, 10**6),
        *(Layer("linear", 128 * 256, 65_792), Layer("gelu", 128 * 256)) * 8,
    )
    classifier, model = (
        PREDICTOR.predict(
            TrainingJob(
                family="transformer",
                batch_size=64,
                input_elements=128,
                sequence_length=128,
                optimizer="adam",
                precision="bf16",
                layers=(*body, Layer("linear", outputs, 256 * 50_000)),
            )
        )
        for outputs in (10, 128 * 50_000)
    )
    assert model.expected_bytes - classifier.expected_bytes > 5 * (64 * 128 * 50_000 * 2)
