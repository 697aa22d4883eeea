"""The module that rebuilds the network of a published row."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from dataset_builder.families import TensorSpec
from gpumemnet.errors import DatasetError
from gpumemnet.job.measurement import Measurement

if TYPE_CHECKING:
    from torch import Tensor, nn

_HOMES: Final[Mapping[str, str]] = {
    "mlp": "dataset_builder.families.mlp",
    "cnn": ".cnn",
    "transformer": ".transformer",
}


class Rebuilds(Protocol):
    """The functions of a :class:`~dataset_builder.families.Family` that rebuilding a row's network
    needs."""

    def parse(self, document: Mapping[str, Any]) -> Any:
        """The architecture from the row's JSON object; ``DatasetError`` on anything else."""
        ...

    def build(self, architecture: Any) -> nn.Module:
        """The network, on torch's current default device."""
        ...

    def tensors(self, architecture: Any) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
        """The inputs of the forward pass, and the targets of the loss."""
        ...

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The training loss of the network's outputs."""
        ...


def published_family(measurement: Measurement) -> Rebuilds:
    """The module that rebuilds the network of a published row.

    Raises:
        DatasetError: when the row is not published, or is a real model's, whose architecture holds
            only its name.
    """
    if measurement.provenance != "published":
        raise DatasetError(f"the row is {measurement.provenance}, not published")
    if measurement.recipe in ("zoo", "timm", "xmem"):
        raise DatasetError(
            "a published real model is not rebuilt from its row: benchmarks/real_models.py or python -m research import-real-runs traces it"
        )
    return cast(Rebuilds, import_module(_HOMES[measurement.job.family], __package__))
