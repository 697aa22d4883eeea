"""The JSON schema of a job, derived from the dataclass
:class:`~gpumemnet.job.training_job.TrainingJob` and its field rules."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

from gpumemnet.job.layers import MAX_ELEMENTS, MAX_LAYERS, Layer
from gpumemnet.job.training_job import (
    FIELD_CHOICES,
    FIELD_RANGES,
    NULLABLE_FIELDS,
    REQUIRED_FIELDS,
    SCHEMA_VERSION,
    TRAINING_OPTIONS,
    TrainingJob,
)

JsonSchema = dict[str, Any]


def job_schema(max_layers: int = MAX_LAYERS) -> JsonSchema:
    """The JSON schema of a :class:`~gpumemnet.job.training_job.TrainingJob`, from the dataclass,
    its docstring and its ranges."""
    descriptions = _attribute_descriptions(TrainingJob) | {
        name: option.description for name, option in TRAINING_OPTIONS.items()
    }
    ranges = {
        name: {"type": "integer", "minimum": low, "maximum": high}
        for name, low, high in FIELD_RANGES
    }
    properties: dict[str, JsonSchema] = {}
    for field in fields(TrainingJob):
        if field.name == "layers":
            schema: JsonSchema = {
                "type": "array",
                "maxItems": max_layers,
                "items": {"$ref": "#/components/schemas/Layer"},
            }
        elif field.name == "schema_version":
            schema = {"const": SCHEMA_VERSION}
        elif field.name in FIELD_CHOICES:
            schema = {"type": "string", "enum": list(FIELD_CHOICES[field.name])}
        else:
            schema = dict(ranges.get(field.name, {"type": "boolean"}))
        if field.name in NULLABLE_FIELDS or field.name == "layers":
            schema = {"anyOf": [schema, {"type": "null"}]}
        elif field.name not in REQUIRED_FIELDS:
            schema["default"] = field.default
        if field.name in descriptions:
            schema["description"] = descriptions[field.name]
        properties[field.name] = schema
    return {
        "type": "object",
        "description": "One training process on one GPU: its layers or their totals, and every option that moves memory.",
        "properties": properties,
        "required": list(REQUIRED_FIELDS),
        "anyOf": [
            {"required": ["layers"], "properties": {"layers": {"type": "array", "minItems": 1}}},
            {
                "required": ["total_activations", "total_parameters"],
                "properties": {
                    "total_activations": {"type": "integer"},
                    "total_parameters": {"type": "integer"},
                },
            },
        ],
        "additionalProperties": False,
    }


def layer_schema() -> JsonSchema:
    """The JSON schema of a :class:`~gpumemnet.job.layers.Layer`, as an object or as a list of
    three."""
    descriptions = _attribute_descriptions(Layer)
    count = {"type": "integer", "minimum": 0, "maximum": MAX_ELEMENTS}
    properties: dict[str, JsonSchema] = {
        "kind": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9_]{0,63}$",
            "examples": ["linear", "conv2d", "relu"],
        },
        "activations": dict(count),
        "parameters": {**count, "default": 0},
    }
    for name, description in descriptions.items():
        properties[name]["description"] = description
    return {
        "description": "One executed layer.",
        "anyOf": [
            {
                "type": "object",
                "properties": properties,
                "required": ["kind", "activations"],
                "additionalProperties": False,
            },
            {
                "type": "array",
                "prefixItems": [properties["kind"], properties["activations"], count],
                "minItems": 3,
                "maxItems": 3,
            },
        ],
    }


def _attribute_descriptions(class_: type) -> dict[str, str]:
    """Field → text, from the ``Attributes:`` section of the docstring."""
    section = (
        inspect.cleandoc(class_.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    )
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {
        name: re.sub(r":\w+:`~?([^`]*)`", r"\1", re.sub(r"\s+", " ", text)).replace("``", "")
        for names, text in entries
        for name in names.split(", ")
    }
