"""Example jobs and requests: the OpenAPI description shows them, and every model must predict them
before it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Document = Mapping[str, Any]


def _layers(*layers: tuple[str, int, int]) -> Sequence[Document]:
    return [
        {"kind": kind, "activations": activations, "parameters": parameters}
        for kind, activations, parameters in layers
    ]


EXAMPLE_JOBS: Final[Mapping[str, Document]] = {
    "mlp": {
        "family": "mlp",
        "batch_size": 128,
        "input_elements": 3 * 32 * 32,
        "optimizer": "adam",
        "precision": "fp32",
        "activation_function": "relu",
        "layers": _layers(
            *(
                ("linear", 2048, 6_293_504),
                ("relu", 2048, 0),
                ("linear", 1024, 2_098_176),
                ("relu", 1024, 0),
            ),
            ("linear", 10, 10_250),
        ),
    },
    "cnn": {
        "family": "cnn",
        "batch_size": 64,
        "input_elements": 3 * 224 * 224,
        "optimizer": "adam",
        "precision": "fp32",
        "activation_function": "relu",
        "layers": _layers(
            *(("conv2d", 802_816, 9_408), ("batch_norm2d", 802_816, 128), ("relu", 802_816, 0)),
            *(("adaptive_avg_pool", 64, 0), ("linear", 1000, 65_000)),
        ),
    },
    "transformer": {
        "family": "transformer",
        "batch_size": 8,
        "input_elements": 512,
        "sequence_length": 512,
        "optimizer": "adam",
        "precision": "fp32",
        "activation_function": "gelu",
        "layers": _layers(
            *(
                ("embedding", 393_216, 38_597_376),
                ("layer_norm", 393_216, 1_536),
                ("attention", 393_216, 2_362_368),
            ),
            *(
                ("linear", 1_572_864, 2_362_368),
                ("gelu", 1_572_864, 0),
                ("linear", 393_216, 2_360_064),
            ),
        ),
    },
}
"""One small job of every family."""


def as_totals(job: Document) -> Document:
    """``job`` as totals, as a scheduler describes it that has no layer list."""
    known = {name: value for name, value in job.items() if name != "layers"}
    layers = job["layers"]
    return {
        **known,
        "total_activations": sum(layer["activations"] for layer in layers),
        "total_parameters": sum(layer["parameters"] for layer in layers),
    }


def predict_examples(family: str) -> dict[str, Document]:
    """Bodies for ``POST /v1/predict`` by name."""
    job = EXAMPLE_JOBS[family]
    devices = [
        {"id": "GPU-0", "gpu": "A100", "free_mib": 9000},
        {"id": "MIG-1", "gpu": "A100", "mig": "1g.5gb"},
    ]
    return {
        "layers": {"job": job},
        "totals": {"job": as_totals(job), "bin_width_mib": 2048},
        "fits": {
            "job": job,
            "gpu": "H100",
            "coverage": 0.95,
            "fits": ["T4", "H100/1g.10gb"],
            "devices": devices,
        },
    }


def batch_examples(family: str) -> dict[str, Document]:
    """Bodies for ``POST /v1/predict/batch`` by name; the second job is invalid."""
    job = as_totals(EXAMPLE_JOBS[family])
    jobs = [job, {**job, "batch_size": 0}]
    return {
        "batch": {"jobs": jobs},
        "chosen": {"jobs": jobs, "fields": ["prediction_id", "safe_bytes"]},
    }


def batch_sizes_examples(family: str) -> dict[str, Document]:
    """Bodies for ``POST /v1/batch-sizes`` by name."""
    job = EXAMPLE_JOBS[family]
    return {
        "gpu": {"job": job, "gpu": "A100/1g.5gb", "max_batch": 16},
        "free": {"job": job, "gpu": "A100", "free_mib": 3000, "max_batch": 16},
    }


FIT_EXAMPLES: Final[Mapping[str, Document]] = {
    "named": {
        "model": "Qwen/Qwen3-8B",
        "method": "qlora",
        "sequence_length": 4096,
        "batch_size": 2,
        "gpu": "RTX-4090",
    },
    "given": {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        "gpu": "T4",
        "precision": "amp_fp16",
    },
}
"""Bodies for ``POST /v1/fit`` by name."""
