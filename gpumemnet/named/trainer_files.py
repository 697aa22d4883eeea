"""Reads the file of a trainer: which model it trains, and how.

``trainer_keys.json`` lists the keys of each trainer: by which its files are known, which are read and
what the trainer does without them, which change what is trained (``rules``), which do not change
memory, and which change it but are not modelled.  Every other key is named as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import MAX_STATED_BYTES, Document, read_file, shipped_json
from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.named.blocks import effects
from gpumemnet.named.methods import ALL_LINEAR, COUNTS, Fields

_YAML: Final = (".yaml", ".yml")
_JSON: Final = ".json"
_OFF: Final[tuple[Any, ...]] = (None, False, 0, "", "none", "no", "off", "false", [], {})


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
    method: Fields
    defaults: Mapping[str, Any]
    saving: tuple[str, ...]
    costing: tuple[str, ...]
    unknown: tuple[str, ...]

    def notes(self, gpus: int | None) -> Iterator[str]:
        """Sentences for the answer to who names some number of GPUs, or none."""
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
        count = gpus or self.method.get("gpus")
        if count is None and self.method.get("parallel", "ddp") != "ddp":
            yield "the file does not say how many GPUs; one, unless --gpu says 8xH100"


_tables: Final = partial(shipped_json, "named/trainer_keys.json")


@dataclass
class _Keys:
    """The keys of a file, those of nested mappings joined by dots, and what became of them."""

    label: str
    values: Document
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
            reference = re.fullmatch(r"\$\{(.+)\}", str(found[0]))  # torchtune's, to another key
            return self.values.get(reference[1]) if reference else found[0]
        if default is not None:
            self.defaults.setdefault(each[0], default)
        return default

    def has(self, *names: str) -> bool:
        """Whether one of these keys is there, or keys nested below it."""
        prefixes = tuple(f"{name}." for name in names)
        return any(each in names or each.startswith(prefixes) for each in self.values)

    def flag(self, names: str, default: bool | None = None) -> bool:
        """Whether a key is switched on."""
        return not _is_off(names, self.get(names, default))

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
        return _read(_Keys("mapping", _flat(source)), "")
    kind = Path(source).suffix.lower()
    if kind not in (*_YAML, _JSON):
        return None
    keys = _Keys(source, _flat(_document(Path(source))))
    is_model = kind == _JSON and keys.has("model_type", "architectures", "_class_name")
    return None if is_model else _read(keys, kind)


def adapter_fields(source: str | Mapping[str, Any]) -> Fields:
    """Fields of the method for a configuration of ``peft``: its keys, or its ``adapter_config.json``.

    Raises:
        InvalidRequestError: the file cannot be read.
    """
    stated = dict(source) if isinstance(source, Mapping) else _document(Path(source))
    rank, targets = stated.get("r"), stated.get("target_modules") or ALL_LINEAR
    names = targets.split(",") if isinstance(targets, str) else sorted(targets)
    known = _known_layers(names)
    return {
        "method": "dora" if stated.get("use_dora") else "lora",
        "adapter": json.dumps(stated, sort_keys=True),
        "lora_target": ",".join(known) if all(known) else ALL_LINEAR,
        "lora_dropout": float(stated.get("lora_dropout") or 0.0),
        **({"lora_rank": rank} if type(rank) is int and rank > 0 else {}),
    }


def _document(path: Path) -> Document:
    import yaml  # a model's name needs none

    try:
        text = read_file(path, MAX_STATED_BYTES)
        document = json.loads(text) if path.suffix.lower() == _JSON else yaml.safe_load(text)
        if isinstance(document, dict):
            return document
    except OSError as error:
        raise InvalidRequestError(f"cannot be read: {error.strerror}", str(path)) from None
    except (ValueError, RecursionError, yaml.YAMLError):
        pass
    raise InvalidRequestError("is no file of a trainer, in YAML or JSON", str(path))


def _flat(mapping: Mapping[Any, Any], prefix: str = "") -> Document:
    """The values, by their keys joined by dots."""
    found: Document = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _read(keys: _Keys, kind: str) -> TrainerFile:
    trainers = _tables()["trainers"]
    name = next((each for each in trainers if keys.has(*trainers[each]["marks"])), None)
    if name is None:
        raise keys.wrong("", f"is no training of a known trainer: {', '.join(trainers)}")
    if name == "Trainer" and kind in _YAML and not keys.has("block_size"):
        name = "TRL"
    table = trainers[name]
    changes = _changes(keys, table)
    if name == "litgpt":
        changes |= _litgpt(keys)
    if name == "TRL" and keys.has("num_generations", "max_completion_length"):
        changes |= _grpo(keys)
    is_full, is_pairs = changes["method"] == "full", changes.pop("is_pairs", False)
    fields: Fields = {}
    for each, key in table["fields"].items():
        if each.startswith("lora_") and (each in changes or is_full):
            keys.read.update(key[0].split())
        else:
            fields |= _value(keys, each, *key)
    evaluated = keys.count(table.get("evaluation", "evaluation"))
    if evaluated is not None and evaluated > fields["batch_size"]:
        keys.costing.append(table["evaluation"])
    if is_pairs:
        fields["batch_size"] *= 2
        keys.costing += ["the reference model of preferences"] * is_full
    flags = {} if is_full else table.get("targets", {})
    layers = [layer for flag, (layer, default) in flags.items() if keys.flag(flag, default)]
    if layers:
        layers = [*filter(None, [fields.get("lora_target")]), *layers]
        fields["lora_target"] = ",".join(layers)
    fields |= {each: value for each, value in changes.items() if value is not None}
    model = keys.get(table["model"])
    return TrainerFile(
        name,
        model and _without_folders(str(model)),
        {each: value for each, value in fields.items() if value is not None},
        keys.defaults,
        **_named(keys, table),
    )


def _changes(keys: _Keys, table: Document) -> Fields:
    """Fields of the method by the rules of a trainer."""
    for names, default in table.get("noted", {}).items():
        keys.get(names, default)
    rules = list(table["rules"])
    if "sharding" in table:
        _read_deepspeed(keys)
        rules = [*_tables()["common"]["rules"], *rules]
    keys.read.update(each.partition("=")[0] for stated, _ in rules for each in stated.split())
    found: Fields = {"method": "full", **table["defaults"], **effects(rules, keys.values)}
    refused = found.pop("refused", None)
    if refused:
        raise keys.wrong(*refused)
    keys.costing += [found.pop("costing")] if "costing" in found else []
    if found.get("parallel") == "fsdp":  # of no stated version
        found["parallel"] = table["sharding"]
    types = f"{found.pop('weights')} {found.pop('compute')}"  # of weights, and of autocast, if any
    return {**_tables()["precisions"][types.strip()], **found}


def _grpo(keys: _Keys) -> Fields:
    """Its batch counts completions, each behind its prompt."""
    keys.costing.append("the generation of completions")
    prompt = keys.count("max_prompt_length", 512) or 0
    keys.values["max_length"] = prompt + (keys.count("max_completion_length", 256) or 0)
    return {"batch_size": keys.count("per_device_train_batch_size", 8)}


def _litgpt(keys: _Keys) -> Fields:
    """Its batches are stated of all GPUs together."""
    is_pretraining = keys.has("model_name")
    devices = keys.get("devices", 1)
    gpus = devices * (keys.count("num_nodes") or 1) if type(devices) is int else None
    batch = keys.count("train.micro_batch_size", 4 if is_pretraining else 1) or 1
    whole = keys.count("train.global_batch_size", 512 if is_pretraining else 16) or 1
    return {
        "batch_size": batch,
        "gradient_accumulation": max(whole // (batch * (gpus or 1)), 1),
        "checkpointing": gpus != 1 and not is_pretraining,
        "gpus": gpus,
    }


def _value(keys: _Keys, each: str, names: str, default: Any = None) -> Fields:
    """A field of the method."""
    if each in COUNTS:
        return {each: keys.count(names, default)}
    if each == "checkpointing":
        return {each: keys.flag(names, default)}
    if each == "lora_dropout":
        return {each: float(keys.get(names) or 0.0)}
    if each == "lora_target":
        return {each: _target(keys, names, default)}
    value = str(keys.get(names, default)).lower()
    if each == "attention":
        kernels = _tables()["attention"]
        return {each: next((kernels[part] for part in kernels if part in value), None)}
    known = _tables()["optimizers"].get(value.rpartition(".")[2].replace("_", ""))
    if known is None:
        keys.costing.append(f"{names} {value} (counted as AdamW)")
    return dict(known or {})


def _known_layers(names: Iterable[str]) -> list[str]:
    """What layers are called here; nothing for one that is not known."""
    layers = _tables()["layers"]
    return [layers.get(each.rpartition(".")[2].strip(), "") for each in names]


def _target(keys: _Keys, name: str, default: str | None) -> str:
    value = keys.get(name, default)
    names = [str(each) for each in (value if isinstance(value, list) else str(value).split(","))]
    known = _known_layers(names)
    target = ",".join(filter(None, known)) or ALL_LINEAR
    if not all(known) and names[0] not in ("all", ALL_LINEAR, "True"):
        keys.saving.append(f"{name.split()[-1]} (counted as {target})")
    return target


def _named(keys: _Keys, table: Document) -> dict[str, tuple[str, ...]]:
    """The keys that are not modelled, and those that are not known."""
    common = _tables()["common"]
    kinds = {
        pattern: kind
        for kind in ("saving", "costing", "harmless")
        for pattern in (*table[kind], *(common[kind] if "common" in table[kind] else ()))
    }
    named = {"harmless": [], "unknown": [], "saving": keys.saving, "costing": keys.costing}
    for name, value in keys.values.items():
        stated = f"{name}={value}".lower()
        pattern = next((each for each in kinds if "=" in each and fnmatchcase(stated, each)), "")
        if pattern:
            named[kinds[pattern]].append(stated)
        elif name not in keys.read:
            pattern = next((each for each in kinds if fnmatchcase(name, each)), "")
            kind = kinds.get(pattern, "unknown")
            if kind == "unknown" or not _is_off(name, value):
                named[kind].append(pattern or name)
    return {kind: tuple(dict.fromkeys(each)) for kind, each in named.items() if kind != "harmless"}


def _without_folders(name: str) -> str:
    """The hub id in a path such as ``checkpoints/meta-llama/Llama-2-7b-hf``, if it is not there."""
    path = Path(name)
    if path.exists() or (len(path.parts) <= 2 and not name.startswith(("/", ".", "~"))):
        return name
    return "/".join(path.parts[-2:]) if path.parts[0] == "checkpoints" else path.name


def _read_deepspeed(keys: _Keys) -> None:
    """Adds the configuration of DeepSpeed, else the stage of ZeRO that the name of its file says."""
    name = str(keys.get("deepspeed") or "")
    for folder in (Path(), *Path(keys.label).parents) if name else ():
        if (folder / name).is_file():
            keys.values |= _flat({"deepspeed": _document(folder / name)})
            break
    found = re.search(r"(?:z|zero|stage)[_-]?([0-3])", name.lower())
    if found is not None:
        keys.values.setdefault("deepspeed.zero_optimization.stage", int(found[1]))
    elif name and not keys.has("deepspeed.zero_optimization.stage"):
        keys.costing.append(f"deepspeed={name} (not found, counted as DDP)")
