"""Jobs of real architectures: the same seed draws the same, a row is what a user's trace says, and
a campaign continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpumemnet
from gpumemnet.extract import ExtractOptions, extract_job
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import TRACED_PARTS, Measurement
from gpumemnet.job.training_job import TrainingOptions
from gpumemnet.site.implausible_rows import implausible_rows
from research.cli import main
from research.traces.real_jobs import campaign
from research.traces.real_jobs.architectures import timm_names
from research.traces.real_jobs.campaign import (
    SAMPLES,
    Plan,
    Subject,
    freeze,
    trace_plan,
)
from research.traces.real_jobs.networks import build, family_of, sample
from research.traces.real_jobs.options import RealOptions

DATASET = (
    Path(campaign.__file__).parents[3]
    / "dataset_builder"
    / "datasets"
    / "real_runs"
    / "traced_real_jobs.parquet"
)

BERT = {
    "library": "transformers",
    "model": "BertForMaskedLM",
    "configuration": "BertConfig",
    "settings": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 1024,
    },
    "length": 64,
}
LSTM = {
    "library": "own",
    "model": "text_classifier",
    "settings": {
        "cell": "lstm",
        "vocabulary": 640,
        "embedding": 32,
        "width": 64,
        "depth": 2,
        "dropout": 0.2,
        "bidirectional": True,
        "classes": 5,
    },
    "length": 32,
}
RECOMMENDER = {
    "library": "own",
    "model": "recommender",
    "settings": {"dense": 8, "tables": 6, "rows": 1000, "width": 16, "bottom": [256], "top": [256]},
}
SQUEEZENET = {"library": "torchvision", "model": "squeezenet1_1", "image_size": 96, "classes": 10}


def plan(key: str = "0.0.0", frozen: str = "none", gpu: str = "A100", **options: Any) -> Plan:
    return Plan(key, RealOptions(TrainingOptions(**options), frozen, gpu), (0.0, 0.5))


def run(folder: Path, architectures: int = 2) -> list[Measurement]:
    command = [
        "trace-real-jobs",
        "--out",
        str(folder),
        "--options-each",
        "2",
        "--rows-each",
        "3",
    ]
    assert main([*command, "--architectures", str(architectures)]) == 0
    return list(read_dataset(folder / "dataset.parquet"))


@pytest.mark.parametrize(
    ("document", "each"),
    [
        (BERT, plan(precision="amp_bf16", checkpointing="every_block", gpu="RTX 4090")),
        (LSTM, plan(optimizer="adagrad", optimizer_implementation="for_loop")),
        (
            RECOMMENDER,
            plan(optimizer="adam", optimizer_implementation="fused", gradient_accumulation=2),
        ),
        (
            SQUEEZENET,
            plan(
                optimizer="sgd_momentum", cudnn_benchmark=True, channels_last=True, gpu="RTX 3060"
            ),
        ),
    ],
    ids=["bert", "lstm", "recommender", "squeezenet"],
)
def test_a_row_is_what_trace_and_extract_say(document: dict[str, Any], each: Plan) -> None:
    subject = Subject(document, build(document))
    rows = list(trace_plan(subject, each))
    assert len(rows) == 2
    network = build(document)
    freeze(network, each.options.frozen)
    stated = ExtractOptions(gpu=each.options.gpu, **each.options.training.job_fields())
    extracted = extract_job(network, sample(document, SAMPLES), stated).job  # without a traced peak
    for row in rows:
        inputs, options = sample(document, row.job.batch_size), each.options.training.job_fields()
        options.pop("ranks")
        answer = gpumemnet.trace(network, inputs, gpu=each.options.gpu, **options)
        assert row.traced["steady_reserved_bytes"] == answer.reserved_bytes
        assert row.label_bytes == answer.expected_bytes
        if answer.startup_peak_bytes is not None:
            assert row.startup_peak_bytes == answer.startup_peak_bytes
        assert row.job == replace(
            extracted,
            batch_size=row.job.batch_size,
            batches_on_gpu=1,
            outputs_freed="after_step",
        )
    assert (row.status, row.label_state, row.provenance, tuple(row.traced)) == (
        "ok",
        "steady",
        "traced",
        TRACED_PARTS,
    )
    assert implausible_rows(rows) == []


@pytest.mark.nightly
def test_the_dataset_keeps_families_whole() -> None:
    every = read_dataset(DATASET)
    rows = every.take(np.arange(0, len(every), 10))
    assert {finding.rule for finding in implausible_rows(rows)} <= {
        "not-monotone"
    }  # cuDNN may choose a smaller workspace
    groups: dict[str, set[str]] = {}
    for row in rows:
        document = json.loads(row.architecture)
        assert row.architecture_family == family_of(document)
        assert row.traced["steady_reserved_bytes"] <= row.traced["startup_peak_reserved_bytes"]
        assert document["library"] != "timm" or document["model"] in {
            name for name, _, _ in timm_names()
        }
        groups.setdefault(row.architecture_family, set()).add(row.split_group)
    assert all(len(names) == 1 for names in groups.values())


@pytest.mark.parametrize(
    ("family", "models"),
    [
        ("resnet", ["timm/resnet50", "torchvision/wide_resnet50_2"]),
        ("vit", ["timm/vit_base_patch16_224", "transformers/DeiTForImageClassification"]),
        ("bert", ["transformers/RobertaForMaskedLM", "transformers/AlbertForMaskedLM"]),
        ("llama", ["transformers/LlamaForCausalLM", "transformers/Qwen2ForCausalLM"]),
        ("recurrent", ["own/text_classifier", "own/language_model"]),
    ],
)
def test_one_family_for_all_libraries(family: str, models: list[str]) -> None:
    for model in models:
        library, name = model.split("/")
        assert family_of({"library": library, "model": name}) == family
