"""Every family, on jobs drawn from its recipe: what is extracted is what torch builds and runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dataset_builder.families import TensorSpec, family, parse_architecture
from dataset_builder.measure.training import build_network
from dataset_builder.planned_job import PlannedJob, parse_planned, training_job
from dataset_builder.recipe import load_recipe, sample_jobs
from gpumemnet.errors import DatasetError
from gpumemnet.extract import extract_job
from gpumemnet.extract.extraction import ExtractOptions
from gpumemnet.job.layers import GROUP_OF_KIND
from gpumemnet.units import GIB

META = torch.device("meta")


def drawn(name: str) -> list[PlannedJob]:
    jobs = sample_jobs(load_recipe(name), 6, 3, 4 * GIB)
    return [replace(job, options=replace(job.options, batch_size=2)) for job in jobs]


def batch_of(
    specs: Sequence[TensorSpec], samples: int, device: torch.device, floating: torch.dtype
) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros(
            samples, *spec.shape, device=device, dtype=floating if spec.high is None else torch.long
        )
        for spec in specs
    )


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_the_job_is_what_the_network_runs(name: str) -> None:
    for planned in drawn(name):
        members, job = family(name), training_job(planned)
        network = build_network(planned, META)
        inputs, target = members.tensors(planned.architecture)
        floating = torch.bfloat16 if planned.options.precision == "bf16" else torch.float32
        batch = batch_of(inputs, 2, META, floating)
        extracted = extract_job(network, batch, ExtractOptions(**job.options.job_fields())).job
        activation = job.activation_function
        extracted, job = (  # the checkpointing is not that of the network which was extracted
            replace(
                each,
                family=name,
                activation_function=activation,
                layers=tuple(layer._replace(block=None) for layer in each.layers),
            )
            for each in (extracted, job)
        )
        assert extracted == job
        assert job.total_parameters == sum(each.numel() for each in network.parameters())
        assert job.trainable_parameters == sum(
            each.numel() for each in network.parameters() if each.requires_grad
        )
        assert {layer.kind for layer in job.layers} <= set(GROUP_OF_KIND)
        logits = network(*batch)
        assert logits.shape == (2, target.high, *target.shape) or logits.shape == (
            *(2, *target.shape),
            target.high,
        )


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_a_row_parse_architectures_its_job_and_its_network(name: str) -> None:
    for planned in drawn(name):
        read = parse_planned(json.loads(json.dumps(planned.to_dict())))
        assert (read, read.key) == (planned, planned.key)
        with META:
            network = family(name).build(
                parse_architecture(name, json.loads(planned.architecture_json))
            )
        assert [tuple(each.shape) for each in network.parameters()] == [
            tuple(each.shape) for each in build_network(planned, META).parameters()
        ]


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("mlp", "{}"), ("cnn", "[]"), ("rnn", "{}"), ("cnn", '{"colour": "red"}')],
)
def test_what_is_no_architecture_is_refused(name: str, architecture: str) -> None:
    with pytest.raises(DatasetError):
        parse_architecture(name, json.loads(architecture))
