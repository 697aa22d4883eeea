"""xMem's published runs on an RTX 3060 and an RTX 4060 (Stone-ResearchLife/xMem, MIT, © 2025 Jiabo
Shi), and their models.

What ran is told in ``dataset_builder/datasets/README.md``.  The reading starts at the bare context:
``protocol`` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from gpumemnet.errors import DatasetError
from gpumemnet.extract.placement import placement
from gpumemnet.job.measurement import Measurement
from gpumemnet.tracing.api import ZERO_GRAD, TraceOptions

from .architecture_families import architecture_family
from .real_runs import Reading, RealModel, RealRuns, Row
from .rows import count_in
from .timm_models import declare_detection

COLUMNS: Final = (
    "kind",
    "model",
    "optimizer",
    "batch_size",
    "gpu",
    "capacity_bytes",
    "zero_grad_mode",
    "measured_bytes",
)
RECIPE: Final = "xmem"
PROTOCOL: Final = "above-context"
"""Readings less the first one, which was taken when the CUDA context existed: the label holds no
bare context."""
IMAGE_SIZE: Final = 86
TOKENS: Final = 128
"""Rows of text are truncated to this many tokens and padded to the longest of the batch, which
nearly always has them all."""
TRANSFORMERS_VERSION: Final = "4.51.3"
"""The version whose models were measured.  Later ones keep other tensors: T5 takes 5 % less with
5.23."""
_TOOLS: Final = ("xmem", "dnnmem", "schedtune", "llmem")


def _torchvision(factory: str, classes: int = 1_000) -> nn.Module:
    declare_detection()
    network: nn.Module = getattr(import_module("torchvision.models"), factory)(
        weights=None, num_classes=classes
    )
    return network


def _transformer(kind: str, configuration: str, attention: str, **fields: Any) -> nn.Module:
    declare_detection()  # transformers imports torchvision where it is installed
    library = import_module("transformers")
    if library.__version__ != TRANSFORMERS_VERSION:
        raise DatasetError(
            f"transformers {TRANSFORMERS_VERSION} was measured, and {library.__version__} is installed: "
            f"pip install transformers=={TRANSFORMERS_VERSION}"
        )
    configured = getattr(library, configuration)(attn_implementation=attention, **fields)
    network: nn.Module = getattr(library, kind)(configured)
    return network


_FACTORIES: Final[Mapping[str, tuple[str, Callable[[], nn.Module]]]] = {
    "ConvNeXtTiny": ("convnext_tiny", partial(_torchvision, "convnext_tiny")),
    "MobileNetV2": ("mobilenet_v2", partial(_torchvision, "mobilenet_v2")),
    "MobeNetV3Small": ("mobilenet_v3_small", partial(_torchvision, "mobilenet_v3_small", 10)),
    "RegNetX400MF": ("regnet_x_400mf", partial(_torchvision, "regnet_x_400mf")),
    "ResNet101": ("resnet101", partial(_torchvision, "resnet101")),
    "VGG16": ("vgg16", partial(_torchvision, "vgg16")),
    "distilbert/distilgpt2": (
        "gpt2_distil",
        partial(_transformer, "GPT2LMHeadModel", "GPT2Config", "sdpa", n_layer=6),
    ),
    "openai-community/gpt2": (
        "gpt2",
        partial(_transformer, "GPT2LMHeadModel", "GPT2Config", "sdpa"),
    ),
    "facebook/opt-125m": ("opt_125m", partial(_transformer, "OPTForCausalLM", "OPTConfig", "sdpa")),
    "T5-small": (
        "t5_small",
        partial(
            _transformer,
            "T5ForConditionalGeneration",
            "T5Config",
            "eager",
            decoder_start_token_id=0,
        ),
    ),
}
"""Name in the table → name by which its family is known, and its constructor; configurations'
defaults are these models'."""
_OPTIMIZERS: Final = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adamw",
    "RMSprop": "rmsprop",
    "Adagrad": "adagrad",
}


def read(rows: Sequence[Row]) -> RealRuns:
    """The models and readings of the table; every pair of model, optimizer and place of
    ``zero_grad`` is one model.

    Raises:
        DatasetError: the table names a model that is not known here, or a cell holds no number.
    """
    models: dict[str, RealModel] = {}
    for row in rows:
        models.setdefault(_key(row), _model(row))
    return RealRuns(
        tuple(models.values()),
        tuple(_reading(row, number) for number, row in enumerate(rows, start=1)),
    )


def _zero_grad(row: Row) -> str:
    mode = row["zero_grad_mode"]
    return ZERO_GRAD[int(mode)] if mode else _usual_zero_grad(row["kind"] == "transformer")


def _usual_zero_grad(is_text: bool) -> str:
    """Where gradients are dropped in the runs whose place was not recorded."""
    return "after_step" if is_text else "before_forward"


def _key(row: Row) -> str:
    if row["model"] not in _FACTORIES:
        raise DatasetError(
            f"model must be one of {', '.join(_FACTORIES)}, not '{row['model'][:60]}'"
        )
    return f"xmem_{_FACTORIES[row['model']][0]}_{_OPTIMIZERS[row['optimizer']]}_{_zero_grad(row)}"


def _model(row: Row) -> RealModel:
    is_text = row["kind"] == "transformer"
    return _real_model(
        row["model"], is_text, _OPTIMIZERS[row["optimizer"]], _zero_grad(row), row["gpu"]
    )


def real_model(row: Measurement) -> RealModel:
    """The model of a row of the dataset, as it was trained.

    Raises:
        DatasetError: the row is of a model that is not known here.
    """
    document, told = json.loads(row.architecture), json.loads(row.options)
    if document["model"] not in _FACTORIES:
        raise DatasetError(
            f"model must be one of {', '.join(_FACTORIES)}, not '{str(document['model'])[:60]}'"
        )
    is_text = document["library"] == "transformers"
    zero_grad = told.get("zero_grad", _usual_zero_grad(is_text))
    return _real_model(document["model"], is_text, row.job.optimizer, zero_grad, row.gpu)


def _real_model(name: str, is_text: bool, optimizer: str, zero_grad: str, gpu: str) -> RealModel:
    options = TraceOptions(
        optimizer=optimizer,
        precision="fp32",
        loss="auto" if is_text else "cross_entropy",
        zero_grad=zero_grad,
        keeps_names=True,
    )
    short, factory = _FACTORIES[name]
    sample = _text if is_text else _images
    return RealModel(
        key=f"xmem_{short}_{optimizer}_{zero_grad}",
        build=partial(_built, factory),
        sample=sample,
        options=options,
        gpu=gpu,
    )


def _built(factory: Callable[[], nn.Module]) -> nn.Module:
    with placement(), torch.device("meta"):
        return factory()


def _images(network: nn.Module, batch_size: int) -> torch.Tensor:
    return torch.empty(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, device="meta")


def _text(network: nn.Module, batch_size: int) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "labels")
    return {
        name: torch.empty(batch_size, TOKENS, dtype=torch.long, device="meta") for name in names
    }


def _reading(row: Row, number: int) -> Reading:
    ran_out = row["out_of_memory"] == "True"
    estimates: dict[str, Any] = {}
    for tool in _TOOLS:
        if row.get(f"{tool}_bytes"):
            estimates[f"{tool}_bytes"] = round(float(row[f"{tool}_bytes"]))
        for told_of in ("oom", "verification_oom"):
            if row.get(f"{tool}_{told_of}"):
                estimates[f"{tool}_{told_of}"] = row[f"{tool}_{told_of}"] == "True"
        if row.get(f"{tool}_seconds"):
            estimates[f"{tool}_seconds"] = round(float(row[f"{tool}_seconds"]), 1)
    told = {"row": number, **estimates} | (
        {"zero_grad": _zero_grad(row)} if row["zero_grad_mode"] else {}
    )
    name = _FACTORIES[row["model"]][0]
    library = "transformers" if row["kind"] == "transformer" else "torchvision"
    fields = {
        "status": "oom" if ran_out else "ok",
        "reason": "out of memory; the reading is what was reached before" if ran_out else None,
        "label_source": "nvml_device_difference",
        "label_state": None if ran_out else "steady",
        "capacity_bytes": count_in(row, "capacity_bytes"),
        "provenance": "published",
        "gpu": row["gpu"],
        "recipe": RECIPE,
        "architecture": json.dumps({"library": library, "model": row["model"]}, sort_keys=True),
        "architecture_family": architecture_family(name),
        "options": json.dumps(told, sort_keys=True),
        "peak_device_bytes": count_in(row, "measured_bytes"),
        "protocol": PROTOCOL,
        "torch": "2.6.0",
        "cuda": "12.4",
        "steps": 4,
        "neighbours": 0,
    }
    return Reading(model=_key(row), batch_size=count_in(row, "batch_size"), fields=fields)
