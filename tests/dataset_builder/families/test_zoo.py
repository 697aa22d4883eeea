"""The zoo of real networks: what is extracted is what is built and trained, and a missing library
is named."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest
import torch

from dataset_builder.families import extracted_job, family, parse_architecture, zoo
from dataset_builder.families.zoo import CATALOGUE
from dataset_builder.measure.training import build_network, train
from dataset_builder.planned_job import Options, PlannedJob, parse_planned, training_job
from dataset_builder.recipe import Choices, load_recipe, sample_jobs
from gpumemnet.errors import DatasetError
from gpumemnet.units import GIB
from tests.nightly import nightly

CPU = torch.device("cpu")
SMALL = {"image_size": 32, "sequence_length": 8}


def zoo_model(name: str, **sizes: int) -> zoo.ZooArchitecture:
    return zoo.compose({"model": name, **SMALL, **sizes})


def test_the_recipe_holds_the_whole_catalogue() -> None:
    models = load_recipe("zoo").features["model"]
    assert isinstance(models, Choices)
    assert models.values == tuple(CATALOGUE)


@pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
def test_a_library_that_is_not_installed_is_named(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    monkeypatch.setattr(
        zoo, "_installed", zoo._installed.__wrapped__
    )  # which remembers its answers
    model = next(zoo_model(name) for name in CATALOGUE if name.startswith(f"{library}/"))
    assert not zoo.can_train(model, 2)
    for use in (zoo.build, lambda model: extracted_job("zoo", model)):
        with pytest.raises(DatasetError, match=f"pip install {library}"):
            use(model)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("torchvision/resnet18", "cnn"),
        *nightly(
            [
                ("transformers/distilbert", "transformer"),
                ("torchvision/fcn_resnet50", "cnn"),
                ("timm/vit_small_patch16_224", "transformer"),
                ("transformers/t5-small", "transformer"),
            ]
        ),
    ],
)
def test_a_real_network_trains_as_it_is_extracted(name: str, family: str) -> None:
    library = name.partition("/")[0]
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed")
    planned = PlannedJob("zoo", zoo_model(name), Options(batch_size=2, optimizer="sgd_momentum"))
    job = training_job(planned)
    assert job.family == family
    assert job.total_parameters == sum(
        each.numel() for each in build_network(planned, CPU).parameters()
    )
    assert (job.sequence_length is not None) == (family == "transformer")
    assert train(planned, CPU, 0, lambda _: 0) == 3


def test_a_row_of_the_zoo_names_its_model_and_is_rebuilt(tmp_path: Any) -> None:
    recipe = tmp_path / "resnets.yaml"
    recipe.write_text(
        "family: zoo\nfeatures: {model: torchvision/resnet18, image_size: [128, 256], sequence_length: 128}\n"
        "options: {batch_size: {from: 2, to: 64, scale: log}}\n"
    )
    jobs = sample_jobs(load_recipe(str(recipe)), 20, 0, 141 * GIB)
    assert len(set(jobs)) == 20
    planned = jobs[0]
    assert parse_planned(json.loads(json.dumps(planned.to_dict()))) == planned
    with torch.device("meta"):
        network = family("zoo").build(
            parse_architecture("zoo", json.loads(planned.architecture_json))
        )
    assert (
        sum(each.numel() for each in network.parameters()) == training_job(planned).total_parameters
    )


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"model": "torchvision/resnet19", "image_size": 64}, "zoo"),
        ({"model": 5}, "zoo"),
        ({"model": "torchvision/resnet18"}, "image_size"),
        (
            {"model": "torchvision/resnet18", "image_size": 64, "sequence_length": 8},
            "sequence_length must be one of 0",
        ),
        ({"model": "torchvision/resnet18", "image_size": 65}, "multiple of 32"),
        ({"model": "torchvision/resnet18", "image_size": "64"}, "whole number"),
        ({"model": "transformers/gpt2", "image_size": 64}, "image_size"),
        ({"model": "torchvision/resnet18", "image_size": 64, "colour": 1}, "zoo"),
    ],
)
def test_a_foreign_model_is_refused(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DatasetError, match=sentence):
        parse_architecture("zoo", document)


def test_single_images_cannot_train() -> None:
    assert not zoo.can_train(zoo_model("torchvision/resnet18"), 1)
    assert zoo.can_train(zoo_model("torchvision/resnet18"), 2)
