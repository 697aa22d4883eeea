"""Reads the file of a trainer: which model it trains, and how.

``trainer_keys.json`` lists the keys of each trainer: by which its files are known, which are read and
what the trainer does without them, which do not change memory, and which change it but are not
modelled.  Every other key is named as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.named.methods import ALL_LINEAR
from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES

_MAX_FILE_BYTES: Final = 2**20
_MAX_KEYS: Final = 10_000
_MAX_DEPTH: Final = 16
_YAML: Final = (".yaml", ".yml")
_JSON: Final = ".json"
_OFF: Final[tuple[Any, ...]] = (None, False, 0, "", "none", "no", "off", "false", [], {})
_COUNTS: Final = ("sequence_length", "batch_size", "gradient_accumulation", "lora_rank", "gpus")
_LITGPT_LAYERS: Final = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "projection": "o_proj",
    "mlp": "gate_proj,up_proj,down_proj",
    "head": "lm_head",
}


@dataclass(frozen=True, slots=True)
class TrainerFile:
    """What a trainer's file says.

    Attributes:
        trainer: whose file it is.
        model: the name of the model; ``None`` if the file names none.
        method: fields of :class:`~gpumemnet.named.methods.Method`.
        defaults: keys that the file leaves out and that decide → what the trainer then does.
        saving, costing: keys that change memory but are not modelled: the answer is too high
            without the first, and may be too low without the second.
        unknown: keys that are not known.
    """

    trainer: str
    model: str | None
    method: Mapping[str, Any]
    defaults: Mapping[str, Any]
    saving: tuple[str, ...]
    costing: tuple[str, ...]
    unknown: tuple[str, ...]

    def notes(self) -> Iterator[str]:
        """Sentences for the answer."""
        stated = ", ".join(f"{key} {value}" for key, value in self.defaults.items())
        yield f"a file of {self.trainer}" + (f"; its defaults: {stated}" if stated else "")
        named = {
            "not modelled, so the answer is too high": self.saving,
            "not modelled, so the answer may be too low": self.costing,
            "unknown keys, not counted": self.unknown,
        }
        for text, keys in named.items():
            if keys:
                yield f"{text}: {', '.join(keys)}"
        if "gpus" not in self.method and self.method.get("parallel", "ddp") != "ddp":
            yield "the file does not say how many GPUs; one, unless --gpu says 8xH100"


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("gpumemnet").joinpath("named/trainer_keys.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@dataclass
class _Keys:
    """The keys of a file, those of nested mappings joined by dots, and what became of them."""

    label: str
    values: dict[str, Any]
    read: set[str] = field(default_factory=set)
    defaults: dict[str, Any] = field(default_factory=dict)
    saving: list[str] = field(default_factory=list)
    costing: list[str] = field(default_factory=list)

    def get(self, names: str, default: Any = None) -> Any:
        """The first of some keys that has a value; the default of the trainer is noted."""
        each = names.split()
        self.read.update(each)
        found = [self.values[name] for name in each if self.values.get(name) is not None]
        if found:
            return found[0]
        if default is not None:
            self.defaults.setdefault(each[0], default)
        return default

    def has(self, *names: str) -> bool:
        """Whether one of these keys is there, or keys nested below it."""
        prefixes = tuple(f"{name}." for name in names)
        return any(each in names or each.startswith(prefixes) for each in self.values)

    def text(self, names: str, default: object = None) -> str:
        """A value in lower case; empty if it is switched off."""
        value = self.get(names, default)
        return "" if _is_off(names, value) else str(value).lower()

    def flag(self, names: str, default: bool | None = None) -> bool:
        """Whether a key is switched on."""
        return bool(self.text(names, default))

    def count(self, names: str, default: int | None = None) -> int | None:
        """A whole number from 1 on; -1 leaves it to the machine."""
        value = self.get(names, default)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if value is None or value == -1:
            return None
        if type(value) is not int or value < 1:
            key = next(name for name in names.split() if self.values.get(name) is not None)
            raise self.wrong(key, f"must be a whole number from 1 on, not {describe(value)}")
        return value

    def wrong(self, name: str, reason: str) -> InvalidRequestError:
        """An error that names the file and the key."""
        return InvalidRequestError(reason, f"{self.label}: {name}" if name else self.label)


def _is_off(name: str, value: Any) -> bool:
    value = value.lower() if isinstance(value, str) else value
    return value in _OFF or (value == 1 and name.endswith(("_size", "_dim")))


def read_trainer_file(source: str | Mapping[str, Any]) -> TrainerFile | None:
    """Reads the file of a trainer, or a mapping of its keys; ``None`` for the name of a model.

    Raises:
        InvalidRequestError: the file cannot be read, is of no known trainer, or has a wrong value.
    """
    if isinstance(source, Mapping):
        return _read(_keys("mapping", source), "")
    kind = Path(source).suffix.lower()
    if kind not in (*_YAML, _JSON):
        return None
    keys = _keys(source, _document(Path(source), kind))
    is_model = kind == _JSON and keys.has("model_type", "architectures")
    return None if is_model else _read(keys, kind)


def _document(path: Path, kind: str) -> dict[str, Any]:
    import yaml  # a model's name needs none

    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        document = json.loads(text) if kind == _JSON else yaml.safe_load(text)
    except OSError as error:
        raise InvalidRequestError(f"cannot be read: {error.strerror}", str(path)) from None
    except (ValueError, RecursionError, yaml.YAMLError):
        raise InvalidRequestError(f"is no {kind[1:].upper()} file", str(path)) from None
    if not isinstance(document, dict) or len(text) > _MAX_FILE_BYTES:
        raise InvalidRequestError("is no file of a trainer", str(path))
    return document


def _keys(label: str, document: Mapping[str, Any]) -> _Keys:
    values: dict[str, Any] = {}

    def add(mapping: Mapping[Any, Any], prefix: str, depth: int) -> None:
        for key, value in mapping.items():
            if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
                add(value, f"{prefix}{key}.", depth + 1)
            else:
                values[f"{prefix}{key}"] = value
            if len(values) > _MAX_KEYS:
                raise InvalidRequestError(f"has more than {_MAX_KEYS:,} keys", label)

    add(document, "", 0)
    for name, value in values.items():  # torchtune refers to another key as ${key}
        if isinstance(value, str) and "${" in value:
            values[name] = re.sub(
                r"\$\{([\w.]+)\}", lambda found: str(values.get(found[1], found[0])), value
            )
    return _Keys(label, values)


def _read(keys: _Keys, kind: str) -> TrainerFile:
    trainers = _tables()["trainers"]
    name = next((each for each in trainers if keys.has(*trainers[each]["marks"])), None)
    if name is None:
        raise keys.wrong("", f"is no training of a known trainer: {', '.join(trainers)}")
    if name == "Trainer" and kind in _YAML and not keys.has("block_size"):
        name = "TRL"
    table = trainers[name]
    changes = _READERS[name](keys)
    pairs = changes.pop("pairs", 1)
    fields: dict[str, Any] = {}
    for each, key in table["fields"].items():
        if changes["method"] == "full" and each.startswith("lora_"):
            keys.read.update(key[0].split())
        else:
            fields[each] = _value(keys, each, *key)
    optimizer, _, implementation = (fields.pop("optimizer") or "adamw fused").partition(" ")
    fields |= {"optimizer": optimizer, "implementation": implementation or "foreach"}
    evaluated = keys.count(table.get("evaluation", "evaluation"))
    if evaluated is not None and evaluated > fields["batch_size"]:
        keys.costing.append(table["evaluation"])
    fields["batch_size"] *= pairs
    if "sharding" in table:
        fields |= _sharding(keys, table["sharding"])
    fields |= {each: value for each, value in changes.items() if value is not None}
    model = keys.get(table["model"])
    return TrainerFile(
        name,
        None if model is None else _without_folders(str(model)),
        {each: value for each, value in fields.items() if value is not None},
        keys.defaults,
        *_named(keys, table),
    )


def _value(keys: _Keys, each: str, names: str, default: Any = None) -> Any:
    """The value of one field of the method."""
    if each in _COUNTS:
        return keys.count(names, default)
    if each == "checkpointing":
        value = keys.text(names, default)
        if "offload" in value:
            keys.saving.append(f"{names.split()[0]} {value}")
        return bool(value)
    if each == "kernels":
        return "liger" if keys.flag(names) else "none"
    if each == "lora_dropout":
        return float(keys.get(names) or 0.0)
    if each == "lora_target":
        return _target(keys, names, default)
    value = str(keys.get(names, default) or "")
    if each == "attention":
        kernels = {"true": "flash", **_tables()["attention"]}
        return next((kernels[part] for part in kernels if part in value.lower()), None)
    known = _tables()["optimizers"].get(value.rpartition(".")[2].lower().replace("_", ""))
    if known is None:
        keys.costing.append(f"{names} {value} (counted as AdamW)")
    return known


def _target(keys: _Keys, name: str, default: str | None) -> str:
    value = keys.get(name, default)
    names = value if isinstance(value, list) else str(value).split(",")
    if {"all", ALL_LINEAR, "True"} & {str(each) for each in names}:
        return ALL_LINEAR
    layers = _tables()["layers"]
    known = [layers.get(str(each).rpartition(".")[2].strip(), "") for each in names]
    if not all(known):
        keys.saving.append(
            f"{name.split()[-1]} (counted as {', '.join(filter(None, known)) or ALL_LINEAR})"
        )
    return ",".join(each for each in known if each) or ALL_LINEAR


def _named(keys: _Keys, table: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """The keys that are not modelled, and those that are not known."""
    common = _tables()["common"]
    kinds = {
        pattern: kind
        for kind in ("harmless", "saving", "costing")
        for pattern in (*table[kind], *(common[kind] if "common" in table[kind] else ()))
    }
    named = {"saving": keys.saving, "costing": keys.costing, "unknown": []}
    for name, value in keys.values.items():
        if name in keys.read:
            continue
        pattern = next((each for each in kinds if fnmatchcase(name, each)), "")
        kind = kinds.get(pattern, "unknown")
        if kind == "unknown":
            named[kind].append(name)
        elif kind != "harmless" and not _is_off(name, value):
            named[kind].append(pattern)
    return tuple(tuple(dict.fromkeys(each)) for each in named.values())


def _without_folders(name: str) -> str:
    """The hub id in a path such as ``checkpoints/meta-llama/Llama-2-7b-hf``, if it is not there."""
    path = Path(name)
    if path.exists() or (len(path.parts) <= 2 and not name.startswith(("/", ".", "~"))):
        return name
    return "/".join(path.parts[-2:]) if path.parts[0] == "checkpoints" else path.name


# ---- several GPUs


def _sharding(keys: _Keys, fsdp: str) -> dict[str, Any]:
    """How several GPUs share a training that ``accelerate`` starts."""
    config = {
        name.rpartition(".")[2].removeprefix("fsdp_"): value
        for name, value in keys.values.items()
        if name.startswith("fsdp_config.") and not _is_off(name, value)
    }
    keys.read.update(each for each in keys.values if each.startswith(("deepspeed", "fsdp_config")))
    if keys.has("deepspeed") and not _is_off("", keys.values.get("deepspeed", "nested")):
        stage, offloads = _deepspeed(keys)
        if offloads:
            keys.saving.append("deepspeed (offload)")
        if stage not in (0, 2, 3):
            keys.saving.append("deepspeed (counted as DDP)")
        return {"parallel": {2: "zero2", 3: "zero3"}.get(stage or 0, "ddp")}
    stated, version = keys.text("fsdp"), keys.get("fsdp_version")
    if not config and not stated:
        return {}
    if config.get("offload_params") or "offload" in stated:
        keys.saving.append("fsdp (offload)")
    if re.search("grad_op|no_shard", f"{stated} {config.get('sharding_strategy')}".lower()):
        keys.costing.append("fsdp (counted as full_shard)")
    version = version or config.get("version")
    fields: dict[str, Any] = {"parallel": f"fsdp{version}" if version else fsdp}
    return fields | ({"checkpointing": True} if config.get("activation_checkpointing") else {})


def _deepspeed(keys: _Keys) -> tuple[int | None, bool]:
    """Stage of ZeRO and whether it offloads: by the file, else by the name of the file."""
    value, found = keys.values.get("deepspeed"), keys.values
    if value is not None:
        value = str(value)
        folders = (Path(), *Path(keys.label).parents)
        file = next((each / value for each in folders if (each / value).is_file()), None)
        if file is None:
            stated = re.search(r"(?:z|zero|stage)[_-]?([0-3])", value.lower())
            return int(stated[1]) if stated else None, "offload" in value
        found = _keys(value, _document(file, _JSON)).values
    stage = next((each for name, each in found.items() if name.endswith("optimization.stage")), 0)
    offloads = any(
        re.search(r"offload_\w+\.device$", name) and each != "none" for name, each in found.items()
    )
    return stage if isinstance(stage, int) else None, offloads


# ---- what each trainer does in its own way


def _precision(weights: str, compute: str) -> dict[str, Any]:
    """Fields for the type in which weights are loaded, and the type of autocast, if any."""
    is_full = weights in ("float32", "fp32")
    precision = "amp_bf16" if compute else "fp32"
    if not is_full:
        precision = "bf16"
    return {
        "precision": "amp_fp16" if compute == "fp16" else precision,
        "has_autocast": bool(compute),
        "frozen_bytes": FULL_BYTES if is_full else HALF_BYTES,
        "raises_frozen": is_full,
    }


def _compute(keys: _Keys, default: bool | None = None) -> str:
    """The type of autocast by two flags."""
    is_brain = keys.flag("bf16 bfloat16", default)
    is_half = keys.flag("fp16 float16") and keys.values.get("bf16") is not True
    return "fp16" if is_half else "bf16" if is_brain else ""


def _pairs(keys: _Keys, method: str) -> int:
    """Samples for each that the batch counts: preferences are pairs, which a reference model reads
    too, unless adapters are switched off for that."""
    if method == "full":
        keys.costing.append("the reference model of preferences")
    return 2


def _transformers(keys: _Keys) -> dict[str, Any]:
    return {"method": "full", **_precision(keys.text("dtype torch_dtype", "auto"), _compute(keys))}


def _trl(keys: _Keys) -> dict[str, Any]:
    method = "full"
    if keys.flag("use_peft"):
        method = "qlora" if keys.flag("load_in_4bit") else "lora"
    weights = keys.text("dtype torch_dtype", "float32")
    changes = {"method": method, **_precision(weights, _compute(keys, default=True))}
    if method == "qlora":
        changes["adapter_bytes"] = HALF_BYTES
    loss = keys.text("loss_type")
    if loss not in ("", "nll", "chunked_nll", "dft") or keys.has("beta", "max_prompt_length"):
        return changes | {"pairs": _pairs(keys, method)}
    keys.get("loss_type", "nll, in chunks")
    kernels = "liger" if keys.flag("use_liger_kernel") else "fused_loss"
    return changes | {"kernels": kernels}


def _llama_factory(keys: _Keys) -> dict[str, Any]:
    if keys.has("export_dir", "infer_backend"):
        raise keys.wrong("", "trains nothing: it exports a model or runs it")
    tuning, stage = keys.text("finetuning_type", "lora"), keys.text("stage", "sft")
    method = "full" if tuning in ("full", "freeze") else "lora"
    if tuning not in ("full", "lora"):
        keys.saving.append(f"finetuning_type {tuning} (counted as {method})")
    quantisation = None
    bits = keys.count("quantization_bit")
    if method == "lora" and bits:
        method = "qlora"
        quantisation = None if keys.flag("double_quantization", default=True) else "nf4"
        if bits != 4:
            keys.costing.append(f"quantization_bit {bits} (counted as 4)")
    if stage == "ppo":
        keys.costing.append("stage ppo")
    is_pure = keys.flag("pure_bf16")
    is_raised = method == "full" and not is_pure and "z3" not in keys.text("deepspeed")
    return {
        "method": method,
        **_precision("float32" if is_raised else "bfloat16", "" if is_pure else _compute(keys)),
        "quantisation": quantisation,
        "checkpointing": not keys.flag("disable_gradient_checkpointing", default=False),
        "pairs": _pairs(keys, method) if stage in ("dpo", "rm") else 1,
    }


def _axolotl(keys: _Keys) -> dict[str, Any]:
    adapter, goal = keys.text("adapter"), keys.text("rl")
    if adapter not in ("", "lora", "qlora"):
        raise keys.wrong("adapter", f"must be lora or qlora, not {adapter!r}")
    method = "qlora" if adapter and keys.flag("load_in_4bit") else adapter or "full"
    if method == "lora" and keys.flag("load_in_8bit"):
        keys.saving.append("load_in_8bit (counted as 16 bits)")
    if method == "lora" and keys.flag("peft_use_dora"):
        method = "dora"
    has_pairs = goal in ("dpo", "ipo", "orpo", "simpo")
    if goal and not has_pairs:
        keys.costing.append(f"rl {goal}")
    compute = _compute(keys, default=True)
    plugins = keys.text("plugins")
    is_cut = keys.flag("cut_cross_entropy") or "cut_cross_entropy" in plugins
    kernels = "fused_loss" if is_cut else "none"
    if keys.flag("liger_fused_linear_cross_entropy"):
        kernels = "liger" if keys.flag("liger_glu_activation liger_swiglu") else "fused_loss"
    return {
        "method": method,
        **_precision("bfloat16" if compute else "float32", compute),
        "kernels": kernels,
        "quantisation": "gptq" if keys.flag("gptq") else None,
        "pairs": _pairs(keys, "" if goal in ("orpo", "simpo") else method) if has_pairs else 1,
    }


def _torchtune(keys: _Keys) -> dict[str, Any]:
    if not keys.has("optimizer"):
        raise keys.wrong("optimizer", "is missing: the file trains nothing")
    builder = keys.text("model._component_").rpartition(".")[2]
    method = builder.partition("_")[0]
    method = method if method in ("lora", "qlora") else "full"
    if method == "lora" and keys.flag("model.quantize_base"):
        method = "qlora"
    if method == "lora" and keys.flag("model.use_dora"):
        method = "dora"
    loss = keys.text("loss._component_").rpartition(".")[2]
    if loss.startswith(("grpo", "ppo")):
        keys.costing.append(f"loss {loss}")
    names = list(keys.get("model.lora_attn_modules") or ())
    names += ["w1", "w2", "w3"] if keys.flag("model.apply_lora_to_mlp") else []
    names += ["lm_head"] if keys.flag("model.apply_lora_to_output") else []
    keys.values["model.lora_attn_modules"] = names
    keys.get("tokenizer.max_seq_len", "that of the data")
    weights = keys.text("dtype", "fp32")
    return {
        "method": method,
        **_precision(weights, ""),
        "raises_frozen": False,
        "adapter_bytes": FULL_BYTES if weights == "fp32" else HALF_BYTES,
        "implementation": "fused" if keys.flag("optimizer.fused") else None,
        "kernels": "fused_loss" if "linearcrossentropy" in loss else "none",
        "pairs": _pairs(keys, method) if "dpo" in loss else 1,
        "parallel": "fsdp2",
    }


def _litgpt(keys: _Keys) -> dict[str, Any]:
    has_adapters, is_pretraining = keys.has("lora_r", "lora_query"), keys.has("model_name")
    quantised = keys.text("quantize")
    precision = keys.text("precision", "bf16-mixed")
    compute, _, kind = precision.partition("-")
    weights = "float32" if kind == "mixed" or compute == "32" else "bfloat16"
    autocast = {"16": "fp16"}.get(compute, compute) if kind == "mixed" else ""
    layers = [
        layer
        for part, layer in _LITGPT_LAYERS.items()
        if has_adapters and keys.flag(f"lora_{part}", part in ("query", "value") or None)
    ]
    devices = keys.get("devices", 1)
    gpus = devices * (keys.count("num_nodes") or 1) if type(devices) is int else None
    batch = keys.count("train.micro_batch_size", 4 if is_pretraining else 1) or 1
    whole = keys.count("train.global_batch_size", 512 if is_pretraining else 16) or 1
    keys.get("train.max_seq_length", "that of the data")
    return {
        "method": ("qlora" if quantised else "lora") if has_adapters else "full",
        **_precision(weights, autocast),
        "raises_frozen": False,
        "raises_logits": False,
        "library": "litgpt",
        "optimizer": "paged_adamw" if quantised else None,
        "quantisation": "nf4" if quantised == "bnb.nf4" else None,
        "adapter_bytes": FULL_BYTES if weights == "float32" else HALF_BYTES,
        "lora_target": ",".join(layers) or None,
        "batch_size": batch,
        "gradient_accumulation": max(whole // (batch * (gpus or 1)), 1),
        "checkpointing": gpus != 1 and not is_pretraining,
        "gpus": gpus,
        "parallel": "fsdp2" if has_adapters else "fsdp1",
    }


_READERS: Final = {
    "torchtune": _torchtune,
    "litgpt": _litgpt,
    "axolotl": _axolotl,
    "LLaMA-Factory": _llama_factory,
    "TRL": _trl,
    "Trainer": _transformers,
}
