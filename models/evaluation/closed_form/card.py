"""What a bundle's card says of the line over the closed form: its slopes, the groups' bounds, and
for which jobs it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import GROUP_OF_KIND
from gpumemnet.job.measurement import PUBLISHED
from gpumemnet.job.training_job import OPTION_FIELDS
from gpumemnet.predict.bundle import Bundle, load_bundle, save_bundle
from gpumemnet.predict.closed_form import GROUPS, TERMS, group_codes

from ...training.card import LIMITS
from .fit import FOLDS, fit, held_out_coverage
from .rows import RealNetworks

TESTED_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "checkpointing": ("none", "every_block"),
    "cudnn_benchmark": (False, True),
    "attention_kernel": (None, "cudnn", "flash", "math", "memory_efficient"),
}
"""Options whose values are not those of the tested bundle's support.

Attention kernels other than math keep the same tensors.
"""
_RANGE_COLUMNS: Final = (
    "batch_size",
    "input_elements",
    "total_parameters",
    "total_activations",
    "trainable_share",
)
"""Feature columns whose ranges bound the jobs that the line answers."""


def calibration(networks: RealNetworks, coverages: Sequence[float]) -> dict[str, Any]:
    """Returns the part of the card that the networks give: everything but the options and ranges,
    which are the bundle's."""
    found = fit(networks, coverages)
    covered, codes = held_out_coverage(networks, coverages), group_codes(networks.features)
    groups = {
        name: {
            "rows": int((codes == group).sum()),
            "log_shifts": found.centre.shifts[group].tolist(),
            "log_scale": float(found.scales[group]),
            "log_bounds": found.bounds[group].tolist(),
            "held_out_coverage": covered[group].round(4).tolist() if (codes == group).any() else [],
        }
        for group, name in enumerate(GROUPS)
    }
    return {
        "method": "a line over the closed form by median regression; in each group cross-conformal bounds over the logarithm of "
        "memory above the context over the line, both with 256 MiB added",
        "rows": len(networks),
        "families": len(set(networks.families.tolist())),
        "slopes": dict(zip(TERMS, found.centre.slopes.tolist(), strict=True)),
        "groups": groups,
        "held_out_method": f"{FOLDS} folds over architecture families",
        "other_share": _largest_other_share(networks.jobs),
    }


def _largest_other_share(jobs: JobTable) -> float:
    """Returns the largest share of a job's activations that layers of no known group put out."""
    is_other = np.array([GROUP_OF_KIND.get(kind, "other") == "other" for kind in jobs.kind_names])
    other = np.bincount(
        jobs.layer_owners,
        jobs.layer_activations * is_other[jobs.layer_kinds],
        minlength=len(jobs),
    )
    return float((other / np.maximum(1.0, jobs.column("total_activations"))).max())


def extend_bundle(folder: Path, calibrated: Mapping[str, Any], union: Mapping[str, Any]) -> Bundle:
    """Writes the closed form's calibration into the card of the bundle in ``folder``.

    In bundles of the MLP-based encoder the closed form answers inside the support, too: it is about
    as good as the classifier (``docs/evaluation/real_networks.md``), and its answers grow with the
    batch.  A bundle of published readings is asked only for jobs like these.

    Args:
        folder: the bundle.
        calibrated: from :func:`calibration`, for the coverages of the bundle.
        union: ``support`` of a bundle of all families: its options and ranges are those for which
            the closed form was tested.

    Raises:
        BundleError: when the folder holds no bundle.
    """
    bundle = load_bundle(folder)
    document: dict[str, Any] = json.loads(json.dumps(bundle.card.document))
    is_published = bundle.card.provenance == PUBLISHED
    options = {
        name: list(TESTED_OPTIONS.get(name, values))
        for name, values in union["options"].items()
        if name in OPTION_FIELDS or name == "gradient_accumulation"
    }
    document["limits"] = LIMITS
    entry = {
        **calibrated,
        "within_support": document["encoder"] == "mlp",
        "beyond_support": not is_published,
        "options": options,
        "ranges": {name: union["ranges"][name] for name in _RANGE_COLUMNS},
    }
    for part in (document, *document.get("families", {}).values()):
        part["fallback"]["closed_form"] = entry
    return save_bundle(folder, bundle.model, document)
