"""Tells, before a deep-learning training job starts, how much GPU memory it will take.

The names below are the public interface; each is loaded when it is first used, so that ``import
gpumemnet`` costs nothing and loads neither torch nor onnxruntime::

    from gpumemnet import Predictor, job_from_json

    estimate = Predictor.default().predict(job_from_json(open("job.json").read()))
    print(estimate.expected_bytes, estimate.safe_bytes)
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os.path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Each is imported under its own name, which makes it public for type checkers.
    # isort: off
    from gpumemnet.client import Client as Client
    from gpumemnet.errors import GpumemnetError as GpumemnetError
    from gpumemnet.extract.placement import large_tensors_on_meta as large_tensors_on_meta
    from gpumemnet.gpu import (
        DeviceProfile as DeviceProfile,
        device_profile as device_profile,
        device_profiles as device_profiles,
    )
    from gpumemnet.job.job_table import JobTable as JobTable
    from gpumemnet.job.json_codec import (
        job_from_dict as job_from_dict,
        job_from_json as job_from_json,
        job_to_dict as job_to_dict,
        job_to_json as job_to_json,
    )
    from gpumemnet.job.layers import Layer as Layer
    from gpumemnet.job.training_job import (
        TrainingJob as TrainingJob,
        TrainingOptions as TrainingOptions,
    )
    from gpumemnet.named.fit import fit as fit
    from gpumemnet.planner.api import plan as plan
    from gpumemnet.predict.bundle import (
        Bundle as Bundle,
        load_bundle as load_bundle,
        shipped_bundles as shipped_bundles,
    )
    from gpumemnet.predict.bundle_card import BundleCard as BundleCard
    from gpumemnet.predict.distribution import (
        PUBLISHED_BINS as PUBLISHED_BINS,
        BinScheme as BinScheme,
        bins_of_width as bins_of_width,
    )
    from gpumemnet.predict.features import (
        FEATURE_COLUMNS as FEATURE_COLUMNS,
        SEQUENCE_COLUMNS as SEQUENCE_COLUMNS,
        feature_matrix as feature_matrix,
        layer_sequence as layer_sequence,
    )
    from gpumemnet.predict.prediction import (
        Prediction as Prediction,
        PredictionOptions as PredictionOptions,
        PredictionTable as PredictionTable,
    )
    from gpumemnet.predict.predictor import Predictor as Predictor
    from gpumemnet.tracing.api import trace as trace
    from gpumemnet.tracing.result import TraceAnswer as TraceAnswer
    # isort: on

_MODULE_OF = {
    **dict.fromkeys(
        ("PUBLISHED_BINS", "BinScheme", "bins_of_width"),
        "gpumemnet.predict.distribution",
    ),
    **dict.fromkeys(("Bundle", "load_bundle", "shipped_bundles"), "gpumemnet.predict.bundle"),
    "Client": "gpumemnet.client",
    **dict.fromkeys(("DeviceProfile", "device_profile", "device_profiles"), "gpumemnet.gpu"),
    **dict.fromkeys(("Prediction", "PredictionOptions"), "gpumemnet.predict.prediction"),
    **dict.fromkeys(
        ("FEATURE_COLUMNS", "SEQUENCE_COLUMNS", "feature_matrix", "layer_sequence"),
        "gpumemnet.predict.features",
    ),
    **dict.fromkeys(
        ("job_from_dict", "job_from_json", "job_to_dict", "job_to_json"), "gpumemnet.job.json_codec"
    ),
    "BundleCard": "gpumemnet.predict.bundle_card",
    "GpumemnetError": "gpumemnet.errors",
    "JobTable": "gpumemnet.job.job_table",
    "Layer": "gpumemnet.job.layers",
    "PredictionTable": "gpumemnet.predict.prediction",
    "Predictor": "gpumemnet.predict.predictor",
    "large_tensors_on_meta": "gpumemnet.extract.placement",
    "TraceAnswer": "gpumemnet.tracing.result",
    "TrainingJob": "gpumemnet.job.training_job",
    "TrainingOptions": "gpumemnet.job.training_job",
    "fit": "gpumemnet.named.fit",
    "plan": "gpumemnet.planner.api",
    "trace": "gpumemnet.tracing.api",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("gpumemnet")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gpumemnet' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__


_COMPILED_FROM = f"{__path__[0]}/compiled_from{importlib.machinery.EXTENSION_SUFFIXES[0]}.json"
if os.path.exists(_COMPILED_FROM):  # noqa: PTH110  # a checkout; pathlib would be the slowest part of this import
    importlib.import_module("gpumemnet.compiled").check_sources(_COMPILED_FROM)
