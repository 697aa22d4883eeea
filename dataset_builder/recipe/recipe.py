"""Recipes: search spaces of training jobs as YAML, so that ranges change without code.

A feature is declared as one value, a list of values (equally likely), ``{choices: {value:
weight}}`` or ``{from: a, to: b, scale: linear | log}``.  ``recipes/mlp.yaml`` shows every form.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError, did_you_mean
from gpumemnet.job.layers import describe
from gpumemnet.units import GIB, MIB

from ..families import FAMILY_NAMES, Feature, family
from .planned_job import FEATURES as OPTIONS

RECIPES: Final = Path(__file__).with_name("recipes")
TENTHS: Final = 10
_UNITS: Final = {"MiB": MIB, "GiB": GIB}


@dataclass(frozen=True, slots=True)
class Choices:
    """Values with their shares, which add up to one."""

    values: tuple[Any, ...]
    shares: tuple[float, ...]

    def value(self, position: float) -> Any:
        """The value at ``position`` in [0, 1)."""
        return self.values[self.cell(position)]

    def cell(self, position: float) -> int:
        """Index of the value at ``position``."""
        total = 0.0
        for index, share in enumerate(self.shares):
            total += share
            if position < total:
                return index
        return len(self.shares) - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, evenly on a linear or logarithmic scale; whole numbers
    include both ends."""

    low: float
    high: float
    log: bool
    whole: bool

    def value(self, position: float) -> int | float:
        """The number at ``position`` in [0, 1)."""
        high = self.high + 1 if self.whole else self.high
        number = (
            self.low * (high / self.low) ** position
            if self.log
            else self.low + (high - self.low) * position
        )
        return min(math.floor(number), int(self.high)) if self.whole else number

    def cell(self, position: float) -> int:
        """Which tenth of the scale ``position`` lies in."""
        return int(position * TENTHS)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each tenth's share."""
        return (1 / TENTHS,) * TENTHS


@dataclass(frozen=True, slots=True)
class MemoryTarget:
    """An amount of memory: bytes, or a share of the card that is measured on."""

    amount_bytes: int | None = None
    share: float | None = None

    def resolve(self, capacity_bytes: int) -> int:
        """The amount in bytes on a card of ``capacity_bytes``."""
        return (
            self.amount_bytes
            if self.amount_bytes is not None
            else int(capacity_bytes * (self.share or 0))
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A search space.

    Attributes:
        name: name of the recipe, stored in its rows.
        family: the networks' family.
        features: the family's features, in the order of the file.
        options: options of the run.
        memory_from, memory_to: samples are spread evenly over the logarithm of the estimated memory
            between these.
        max_operations: jobs with more floating-point operations per optimizer step are left out,
            because they take too long.
        digest: SHA-256 of the file.
    """

    name: str
    family: str
    features: Mapping[str, Choices | Range]
    options: Mapping[str, Choices | Range]
    memory_from: MemoryTarget
    memory_to: MemoryTarget
    max_operations: float
    digest: str


def load_recipe(name_or_path: str) -> Recipe:
    """A shipped recipe by its name (``mlp``) or any recipe by its path.

    Raises:
        InvalidRequestError: names the file, the key and what it may be.
    """
    import yaml

    path = Path(name_or_path)
    if not path.suffix and not path.is_file():
        path = RECIPES / f"{name_or_path}.yaml"
    try:
        text = path.read_bytes()
    except OSError as error:
        shipped = ", ".join(sorted(each.stem for each in RECIPES.glob("*.yaml")))
        raise InvalidRequestError(
            f"{name_or_path} cannot be read ({error.strerror}); shipped are {shipped}", "recipe"
        ) from None
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise InvalidRequestError(f"{path} is not YAML: {problem}", "recipe") from None
    try:
        return _recipe(document, path.stem, hashlib.sha256(text).hexdigest())
    except InvalidRequestError as error:
        raise InvalidRequestError(
            error.reason, f"{path}: {error.field}" if error.field else str(path)
        ) from None


def _recipe(document: object, name: str, digest: str) -> Recipe:
    top = _mapping(document, "", ("name", "family", "features", "options", "memory", "work"))
    family_name = top.get("family")
    if family_name not in FAMILY_NAMES:
        raise InvalidRequestError(
            f"must be one of {', '.join(FAMILY_NAMES)}, not {describe(family_name)}", "family"
        )
    family_features = family(family_name).FEATURES
    features = _mapping(top.get("features"), "features", tuple(family_features))
    options = _mapping(top.get("options"), "options", tuple(OPTIONS))
    for section, given, needed in (
        ("features", features, tuple(family_features)),
        ("options", options, ("batch_size",)),
    ):
        for feature in needed:
            if feature not in given:
                raise InvalidRequestError("is missing", f"{section}.{feature}")
    memory = _mapping(top.get("memory", {}), "memory", ("from", "to"))
    work = _mapping(top.get("work", {}), "work", ("max_pflop_per_step",))
    name = top.get("name", name)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name):
        raise InvalidRequestError(f"must be a short lower-case name, not {describe(name)}", "name")
    return Recipe(
        name=name,
        family=str(family_name),
        features={
            key: _dimension(features[key], family_features[key], f"features.{key}")
            for key in family_features
        },
        options={
            key: _dimension(given, OPTIONS[key], f"options.{key}") for key, given in options.items()
        },
        memory_from=_amount(memory.get("from", "0.5 GiB"), "memory.from"),
        memory_to=_amount(memory.get("to", "105 %"), "memory.to"),
        max_operations=_number(work.get("max_pflop_per_step", math.inf), "work.max_pflop_per_step")
        * 1e15,
        digest=digest,
    )


def _mapping(value: object, field: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"must be a mapping with {', '.join(known)}, not {describe(value)}", field
        )
    for key in value:
        if key not in known:
            hint = did_you_mean(key, known, f"known keys are {', '.join(known)}")
            raise InvalidRequestError(
                f"is not a known key: {hint}",
                f"{field}.{str(key)[:40]}" if field else str(key)[:40],
            )
    return value


def _dimension(given: object, feature: Feature, field: str) -> Choices | Range:
    if isinstance(given, Mapping) and "from" in given:
        return _range(_mapping(given, field, ("from", "to", "scale")), feature, field)
    if isinstance(given, Mapping):
        choices = _mapping(given, field, ("choices", "from", "to", "scale")).get("choices")
        if not isinstance(choices, Mapping) or not choices:
            raise InvalidRequestError(
                "needs either from and to, or choices with a weight for each value", field
            )
        weights = {
            _value(value, feature, field): _number(weight, f"{field}.choices")
            for value, weight in choices.items()
        }
        if min(weights.values()) < 0 or sum(weights.values()) <= 0:
            raise InvalidRequestError(
                "needs weights of zero or more, at least one of them above zero", field
            )
    else:
        values = given if isinstance(given, list) else [given]
        weights = dict.fromkeys((_value(value, feature, field) for value in values), 1.0)
        if not weights:
            raise InvalidRequestError("needs at least one value", field)
    total = sum(weights.values())
    return Choices(tuple(weights), tuple(weight / total for weight in weights.values()))


def _range(given: Mapping[str, Any], feature: Feature, field: str) -> Range:
    if feature.kind in (str, bool):
        raise InvalidRequestError("is not a number: give choices instead of a range", field)
    low = _value(given["from"], feature, f"{field}.from")
    high = _value(given.get("to"), feature, f"{field}.to")
    scale = given.get("scale", "linear")
    if scale not in ("linear", "log"):
        raise InvalidRequestError(f"must be linear or log, not {describe(scale)}", f"{field}.scale")
    if low > high:
        raise InvalidRequestError(
            f"is an impossible range: it goes from {low} down to {high}", field
        )
    if scale == "log" and low <= 0:
        raise InvalidRequestError("must begin above zero on a logarithmic scale", field)
    return Range(low, high, scale == "log", feature.kind is int)


def _value(value: Any, feature: Feature, field: str) -> Any:
    if feature.kind is str:
        if value not in feature.choices:
            raise InvalidRequestError(
                f"must be one of {', '.join(feature.choices)}, not {describe(value)}", field
            )
        return value
    if feature.kind is bool:
        if not isinstance(value, bool):
            raise InvalidRequestError(f"must be true or false, not {describe(value)}", field)
        return value
    number = _number(value, field)
    if not feature.minimum <= number <= feature.maximum:
        raise InvalidRequestError(
            f"must lie between {feature.minimum:g} and {feature.maximum:g}, not {describe(value)}",
            field,
        )
    if feature.kind is int and not isinstance(value, int):
        raise InvalidRequestError(f"must be a whole number, not {describe(value)}", field)
    return value if feature.kind is int else number


def _number(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidRequestError(f"must be a number, not {describe(value)}", field)
    return float(value)


def _amount(value: object, field: str) -> MemoryTarget:
    match = (
        re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?(MiB|GiB|%)", value)
        if isinstance(value, str)
        else None
    )
    if match is None or float(match[1]) <= 0:
        raise InvalidRequestError(
            f"must be an amount such as '0.5 GiB' or '105 %', not {describe(value)}", field
        )
    if match[2] == "%":
        return MemoryTarget(share=float(match[1]) / 100)
    return MemoryTarget(amount_bytes=int(float(match[1]) * _UNITS[match[2]]))
