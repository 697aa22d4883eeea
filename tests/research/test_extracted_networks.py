"""Networks that are no language models: what the libraries execute is what the catalogue holds."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.errors import FieldError
from gpumemnet.named.architectures import extracted_network
from gpumemnet.named.catalogue import find_model
from gpumemnet.named.fit import fit

pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpumemnet.torch_private.names import declare_torchvision_operators

declare_torchvision_operators()
pytest.importorskip("torchvision")
from research.extracted_networks import Source, extracted, sources  # noqa: E402

SEGFORMER = "nvidia/segformer-b0-finetuned-ade-512-512"
SWIN = "microsoft/swin-tiny-patch4-window7-224"
RESNET = "torchvision/resnet18"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    table = tmp_path_factory.mktemp("table") / "configs.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(["hub_id", "architecture", "other"])
    return {source.name: source for source in sources(table)}


@pytest.mark.parametrize("name", [SWIN, RESNET, SEGFORMER])
def test_the_catalogue_holds_what_the_library_executes(known: dict[str, Source], name: str) -> None:
    found = extracted(known[name])
    model = find_model(name)
    assert json.loads(json.dumps(found["network"])) == model.extracted
    assert found["parameters"] == model.parameters


def test_a_size_that_was_not_extracted_is_a_polynomial_of_those_that_were(
    known: dict[str, Source],
) -> None:
    usual = find_model(SEGFORMER).extracted
    assert usual is not None
    source = known[SEGFORMER]
    larger = Source(source.name, source.build, source.inputs, 640)
    by_polynomial, as_executed = (
        extracted_network(usual, 640),
        extracted_network(extracted(larger)["network"], 640),
    )

    def sizes(network: Any) -> list[tuple[str, int, int]]:
        return [
            (each.kind, each.elements, each.rows)
            for section in network.sections
            for each in section.operators
        ]

    assert sizes(by_polynomial) == sizes(as_executed)


@pytest.mark.parametrize(
    "model",
    [
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "stabilityai/stable-diffusion-xl-base-1.0",
        "stabilityai/stable-diffusion-3-medium-diffusers",
        "black-forest-labs/FLUX.1-dev",
    ],
)
def test_diffusion_is_asked_by_name_and_resolution(model: str) -> None:
    small, large = (
        fit(model, method="lora", checkpointing=False, resolution=each) for each in (512, 1024)
    )
    assert 0 < small.trained_parameters < small.parameters / 10
    grown = [each.parts["activations_bytes"] for each in (small, large)]
    assert 2.0 < grown[1] / grown[0] < 6.0
    with pytest.raises(FieldError, match="names no layer"):
        fit(model, method="lora", lora_target="q_proj")


def test_a_resolution_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="at no other size"):
        fit(RESNET, resolution=320)
    with pytest.raises(FieldError, match="networks of images"):
        fit("Qwen/Qwen3-8B", resolution=320)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(FieldError, match="gpumemnet trace"):
        fit(str(config))
