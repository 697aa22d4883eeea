"""Chooses the jobs of the golden answers.

They are three plain networks with one option changed at a time, random mixes of options, odd jobs,
and published rows.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED_ROWS = {  # rows of dataset_builder/datasets/*.parquet
    "published_mlp_a100": (0, 17, 1500, 2999),
    "published_cnn_a100": (3, 60, 140),
    "published_transformer_a100": (1, 40, 100, 160),
    "published_real_models_a100": (0, 12),
}
_NOT_OF_JOBS = {"total_activations", "total_parameters"}  # the layers say so

Job = dict[str, Any]


def golden_jobs() -> dict[str, Job]:
    """Name → job document; the same in every run."""
    jobs: dict[str, Job] = {}
    bases = {"mlp": _mlp(), "cnn": _cnn(), "transformer": _transformer()}
    for family, base in bases.items():
        jobs[family] = base
        jobs[f"{family} totals"] = totals(base)
        for batch_size in (1, 200, 2**31 - 1):
            jobs[f"{family} batch {batch_size}"] = base | {"batch_size": batch_size}
        jobs[f"{family} half frozen"] = base | {"trainable_parameters": _parameters(base) // 2}
        jobs[f"{family} accumulation"] = base | {"gradient_accumulation": 4}
        jobs[f"{family} checkpointing"] = base | {"checkpointing": "every_block"}
        jobs[f"{family} traced"] = base | {"traced_peak_bytes": 3_000_000_000}
        jobs[f"{family} replicas"] = base | {"ranks": 8}
        for precision in ("tf32", "amp_fp16", "amp_bf16", "bf16"):
            jobs[f"{family} {precision}"] = base | {"precision": precision}
    for optimizer in ("sgd", "sgd_momentum", "adamw", "rmsprop", "adagrad", "adafactor"):
        jobs[f"mlp {optimizer}"] = bases["mlp"] | {"optimizer": optimizer}
        jobs[f"transformer {optimizer} totals"] = totals(bases["transformer"]) | {
            "optimizer": optimizer,
            "precision": "amp_bf16",
        }
    for implementation in ("foreach", "fused", "for_loop"):
        jobs[f"transformer {implementation}"] = bases["transformer"] | {
            "optimizer_implementation": implementation
        }
        jobs[f"mlp sgd_momentum {implementation}"] = bases["mlp"] | {
            "optimizer": "sgd_momentum",
            "optimizer_implementation": implementation,
        }
    for kernel in ("math", "flash", "cudnn"):  # the base has the fourth
        jobs[f"transformer {kernel}"] = bases["transformer"] | {
            "attention_kernel": kernel,
            "precision": "bf16",
        }
    jobs |= {
        "cnn channels_last": bases["cnn"] | {"channels_last": True, "precision": "amp_bf16"},
        "cnn cudnn_benchmark": bases["cnn"] | {"cudnn_benchmark": True},
        "cnn channels_last cudnn_benchmark": bases["cnn"]
        | {"channels_last": True, "cudnn_benchmark": True, "precision": "tf32"},
        "transformer totals replicas": totals(bases["transformer"])
        | {"ranks": 64, "precision": "bf16"},
        "transformer traced replicas": bases["transformer"]
        | {"ranks": 2, "traced_peak_bytes": 9_000_000_000},
        "mlp traced amp": bases["mlp"]
        | {"precision": "amp_fp16", "traced_peak_bytes": 600_000_000},
        "mlp all frozen": bases["mlp"] | {"trainable_parameters": 0},
        "mlp unknown kinds": bases["mlp"]
        | {"layers": [*bases["mlp"]["layers"], ["hyena", 1024, 5000], ["kan_spline", 100, 0]]},
        "mlp swiglu": bases["mlp"] | {"activation_function": "swiglu"},
        "mlp other activation": bases["mlp"] | {"activation_function": "other"},
        "mlp no activation": {
            name: value for name, value in bases["mlp"].items() if name != "activation_function"
        },
        "mlp layers as objects": bases["mlp"]
        | {"layers": [_layer_object(layer) for layer in bases["mlp"]["layers"]]},
        "mlp wide input": bases["mlp"] | {"input_elements": 10**6},
        "mlp one layer": bases["mlp"] | {"layers": [["linear", 10, 10_250]]},
        "mlp nothing": totals(bases["mlp"]) | {"total_activations": 0, "total_parameters": 0},
        "cnn recurrent": bases["cnn"]
        | {"layers": [*bases["cnn"]["layers"], ["lstm", 4096, 8_000_000]]},
        "transformer too large": totals(bases["transformer"]) | {"total_parameters": 10**12},
        "transformer odd length": bases["transformer"]
        | {"sequence_length": 7, "input_elements": 7},
        "transformer inputs only": {
            name: value for name, value in bases["transformer"].items() if name != "sequence_length"
        },
    }
    jobs |= _random_jobs(bases, 12)
    jobs["example"] = _example()
    return jobs | _published_jobs()


BAD_JOBS: dict[str, Any] = {
    "no object": 7,
    "empty": {},
    "null batch": {"batch_size": None},
    "zero batch": {"batch_size": 0},
    "text batch": {"batch_size": "32"},
    "fractional batch": {"batch_size": 1.5},
    "endless batch": {"batch_size": 10**30},
    "unknown family": {"family": "rnn"},
    "unknown optimizer": {"optimizer": "lion"},
    "unknown precision": {"precision": "fp8"},
    "misspelt field": {"batch_sise": 1},
    "no truth value": {"channels_last": "yes"},
    "wrong total": {"total_parameters": 1},
    "too many trainable": {"trainable_parameters": 2**50},
    "no layers, no totals": {"layers": []},
    "short layer": {"layers": [["relu", 1, 0], ["relu", 1]]},
    "layer with a bad kind": {"layers": [{"kind": "Linear!", "activations": 1}]},
    "layer with a bad count": {"layers": [{"kind": "relu", "activations": -1}]},
    "too many ranks": {"ranks": 2**17},
    "later schema": {"schema_version": 99},
}
"""Name → what is changed in the job ``mlp``; the first two are sent as they are."""


def golden_bad_jobs() -> dict[str, Any]:
    """Name → a document that is no job."""
    base = _mlp()
    return {
        name: base | change if isinstance(change, dict) and change else change
        for name, change in BAD_JOBS.items()
    }


def totals(job: Job) -> Job:
    """``job`` without its layers."""
    kept = {name: value for name, value in job.items() if name != "layers"}
    return kept | {
        "total_activations": sum(layer[1] for layer in job["layers"]),
        "total_parameters": _parameters(job),
    }


def _parameters(job: Job) -> int:
    return sum(layer[2] for layer in job["layers"])


def _layer_object(layer: list[Any]) -> Job:
    kind, activations, parameters = layer
    return {"kind": kind, "activations": activations} | (
        {"parameters": parameters} if parameters else {}
    )


def _mlp() -> Job:
    layers: list[list[Any]] = []
    for given, width in ((1024, 4096), (4096, 2048), (2048, 512)):
        layers += [
            ["linear", width, (given + 1) * width],
            ["batch_norm1d", width, 2 * width],
            ["relu", width, 0],
        ]
    layers += [["dropout", 512, 0], ["linear", 100, 51_300]]
    return _job(
        "mlp", batch_size=64, input_elements=1024, activation_function="relu", layers=layers
    )


def _cnn() -> Job:
    layers: list[list[Any]] = []
    channels = 3
    for width, side in ((64, 112), (128, 56), (256, 28), (512, 14)):
        size = width * side * side
        for _ in range(2):
            layers += [
                ["conv2d", size, channels * width * 9],
                ["batch_norm2d", size, 2 * width],
                ["relu", size, 0],
            ]
            channels = width
        layers += [["add", size, 0], ["max_pool", size // 4, 0]]
    layers += [["adaptive_avg_pool", 512, 0], ["linear", 1000, 513_000]]
    return _job(
        "cnn",
        batch_size=32,
        input_elements=3 * 224 * 224,
        activation_function="relu",
        layers=layers,
    )


def _transformer() -> Job:
    width, tokens, vocabulary = 512, 256, 32_000
    size = width * tokens
    layers: list[list[Any]] = [
        ["embedding", size, vocabulary * width],
        ["positional_embedding", size, tokens * width],
    ]
    for _ in range(6):
        layers += [
            *(
                ["layer_norm", size, 2 * width],
                ["attention", size, 4 * (width + 1) * width],
                ["dropout", size, 0],
            ),
            *(
                ["add", size, 0],
                ["layer_norm", size, 2 * width],
                ["linear", 4 * size, 4 * (width + 1) * width],
            ),
            *(["relu", 4 * size, 0], ["linear", size, (4 * width + 1) * width], ["add", size, 0]),
        ]
    layers += [
        ["layer_norm", size, 2 * width],
        ["linear", vocabulary * tokens, vocabulary * (width + 1)],
    ]
    options = {
        "sequence_length": tokens,
        "activation_function": "relu",
        "attention_kernel": "memory_efficient",
    }
    return _job("transformer", batch_size=16, input_elements=tokens, **options, layers=layers)


def _job(family: str, **options: Any) -> Job:
    return {"family": family, "optimizer": "adam", "precision": "fp32", **options}


def _random_jobs(bases: dict[str, Job], each: int) -> dict[str, Job]:
    """Mixes of options, as only one at a time is changed in the others."""
    draw = random.Random(23)
    found = {}
    for number in range(each):
        base = bases[draw.choice(("mlp", "cnn", "transformer"))]
        if draw.random() < 0.4:
            base = totals(base)
        found[f"random {number}"] = base | {
            "batch_size": draw.randint(1, 900),
            "optimizer": draw.choice(
                ("sgd", "sgd_momentum", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
            ),
            "optimizer_implementation": draw.choice(("default", "foreach", "fused", "for_loop")),
            "precision": draw.choice(("fp32", "tf32", "amp_fp16", "amp_bf16", "bf16")),
            "checkpointing": draw.choice(("none", "every_block")),
            "gradient_accumulation": draw.choice((1, 2, 4)),
            "channels_last": base["family"] == "cnn" and draw.random() < 0.5,
            "cudnn_benchmark": base["family"] == "cnn" and draw.random() < 0.5,
            "ranks": draw.choice((1, 1, 4)),
        }
    return found


def _example() -> Job:
    example: Job = json.loads((ROOT / "examples" / "mlp_job.json").read_text())
    return example


def _published_jobs() -> dict[str, Job]:
    """Rows of the published tables, as jobs with what a scheduler may say of them."""
    found = {}
    for name, rows in PUBLISHED_ROWS.items():
        table = pq.read_table(ROOT / "dataset_builder" / "datasets" / f"{name}.parquet")
        fields = table.column_names[: table.column_names.index("schema_version")]
        for row, values in zip(
            rows, table.select(fields).take(list(rows)).to_pylist(), strict=True
        ):
            job = {
                field: value
                for field, value in values.items()
                if value is not None and field not in _NOT_OF_JOBS
            }
            found[f"{name} {row}"] = job | {
                "layers": [list(layer.values()) for layer in job["layers"]]
            }
    return found
