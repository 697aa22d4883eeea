"""The documents of ``GET /v1/gpus`` and ``GET /v1/models``, and the summary of a model that every
prediction repeats."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from gpumemnet.gpu.available import available_mib, mig_profiles, reserve
from gpumemnet.gpu.catalogue import device_profiles
from gpumemnet.predict.bundle import Bundle
from gpumemnet.units import MIB

TRAINING_DATA_FIELDS: Final = ("description", "provenance", "label_source", "licence")
"""The members of a card's training data that every prediction repeats; ``GET /v1/models`` has the
rest."""

Document = dict[str, Any]


@cache
def gpus_document() -> Document:
    """The response to ``GET /v1/gpus``."""
    return {
        "gpus": [
            {
                "name": profile.name,
                "aliases": profile.aliases,
                "capacity_mib": profile.capacity_bytes // MIB,
                "reserved_mib": reserve(profile.name).reserved_mib,
                "reserved_source": reserve(profile.name).source,
                "available_mib": available_mib(profile),
                "mig": [
                    {
                        "name": mig.name,
                        "memory_mib": mig.memory_mib,
                        "available_mib": available_mib(profile, mig),
                        "source": mig.source,
                    }
                    for mig in mig_profiles(profile.name)
                ],
            }
            for profile in device_profiles()
        ]
    }


def model_summary(bundle: Bundle) -> Document:
    """The model, as predictions name it."""
    card = bundle.card
    training_data = card.document.get("training_data", {})
    return {
        "name": card.name,
        "version": card.version,
        "sha256": bundle.sha256,
        "family": card.family,
        "encoder": card.encoder,
        "training_data": {field: training_data.get(field) for field in TRAINING_DATA_FIELDS},
    }


def model_details(bundle: Bundle) -> Document:
    """The model with its card, as ``GET /v1/models`` lists it."""
    card = bundle.card
    return {
        **model_summary(bundle),
        "gpu": card.gpu,
        "coverages": card.coverages,
        "card": card.document,
    }
