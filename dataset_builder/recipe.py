"""Recipes: search spaces of training jobs as YAML, so that ranges change without code, and the jobs
that are drawn from them.

A feature is declared as one value, a list of values (equally likely), ``{choices: {value:
weight}}`` or ``{from: a, to: b, scale: linear | log}``.  ``recipes/mlp.yaml`` shows every form.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpumemnet.errors import InvalidRequestError, did_you_mean
from gpumemnet.job.layers import check_choice, describe
from gpumemnet.job.table_reader import error_at
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.units import GIB, MIB

from .families import Feature, family
from .planned_job import FEATURES as OPTIONS
from .planned_job import (
    Options,
    PlannedJob,
    can_run,
    operations_per_step,
    rough_bytes,
)

RECIPES: Final = Path(__file__).with_name("recipes")
MEMORY_SLICES: Final = 24
_POINTS: Final = 4_096
"""Candidates that are looked at at once."""
_MAX_ROUNDS: Final = 100
_CANDIDATES_PER_JOB: Final = 2
_TILTS: Final = (1.0, 2.0, 4.0, 8.0)
"""Exponents of the four quarters of the candidates: one uniform, three biased towards large values.

Few uniform points need much memory."""
_UNITS: Final = {"MiB": MIB, "GiB": GIB}


@dataclass(frozen=True, slots=True)
class Choices:
    """Values with their shares, which add up to one."""

    values: tuple[Any, ...]
    shares: tuple[float, ...]

    def value(self, position: float) -> Any:
        """The value at ``position`` in [0, 1)."""
        index = bisect.bisect(list(itertools.accumulate(self.shares)), position)
        return self.values[min(index, len(self.values) - 1)]


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


MemoryTarget = Callable[[int], int]
"""An amount of memory: its bytes on a card of so many bytes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A search space.

    Attributes:
        name: name of the recipe, stored in its rows.
        family: the networks' family.
        features: the family's features, in the order of the file.
        options: options of the run.
        memory_from, memory_to: jobs are spread evenly over the logarithm of the estimated memory
            between these, as far as the features allow it.
        max_operations: jobs with more floating-point operations per optimizer step are left out,
            because they take too long.
        digest: SHA-256 of the file.
    """

    name: str
    family: str
    features: dict[str, Choices | Range]
    options: dict[str, Choices | Range]
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
        raise error_at(error, str(path), ": ") from None


def _recipe(document: object, name: str, digest: str) -> Recipe:
    top = _mapping(document, "", ("name", "family", "features", "options", "memory", "work"))
    family_name = check_choice(top.get("family"), FAMILIES, "family")
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
        found = _mapping(given, field, ("choices", "from", "to", "scale")).get("choices")
        weighted = [*found.items()] if isinstance(found, Mapping) else []
    else:
        weighted = [(value, 1.0) for value in (given if isinstance(given, list) else [given])]
    weights = {
        _value(value, feature, field): _number(weight, f"{field}.choices")
        for value, weight in weighted
    }
    total = sum(weights.values())
    if min(weights.values(), default=0.0) < 0 or not total:
        raise InvalidRequestError(
            "needs from and to, or at least one value, with weights of zero or more that are not all zero",
            field,
        )
    return Choices(tuple(weights), tuple(weight / total for weight in weights.values()))


def _range(given: Mapping[str, Any], feature: Feature, field: str) -> Range:
    low, high = (_value(given.get(end), feature, f"{field}.{end}") for end in ("from", "to"))
    scale = given.get("scale", "linear")
    is_log = scale == "log"
    if (
        feature.kind is bool
        or not (is_log or scale == "linear")
        or low > high
        or (is_log and low <= 0)
    ):
        raise InvalidRequestError(
            "must go from the smaller number to the larger, on a scale that is linear or log; where it is log, above zero",
            field,
        )
    return Range(low, high, is_log, feature.kind is int)


def _value(value: Any, feature: Feature, field: str) -> Any:
    if feature.kind is str:
        is_right, wanted = value in feature.choices, f"one of {', '.join(feature.choices)}"
    elif feature.kind is bool:
        is_right, wanted = isinstance(value, bool), "true or false"
    else:
        is_whole = feature.kind is int
        is_number = type(value) is int or (type(value) is float and not is_whole)
        is_right = is_number and feature.minimum <= value <= feature.maximum
        wanted = (
            f"a {'whole ' * is_whole}number between {feature.minimum:g} and {feature.maximum:g}"
        )
    if not is_right:
        raise InvalidRequestError(f"must be {wanted}, not {describe(value)}", field)
    return feature.kind(value)


def _number(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidRequestError(f"must be a number, not {describe(value)}", field)
    return float(value)


def _amount(value: object, field: str) -> MemoryTarget:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?(MiB|GiB|%)", str(value))
    if match is None or float(match[1]) <= 0:
        raise InvalidRequestError(
            f"must be an amount such as '0.5 GiB' or '105 %', not {describe(value)}", field
        )
    if match[2] == "%":
        share = float(match[1]) / 100
        return lambda capacity_bytes: int(capacity_bytes * share)
    amount_bytes = int(float(match[1]) * _UNITS[match[2]])
    return lambda capacity_bytes: amount_bytes


def sample_jobs(recipe: Recipe, count: int, seed: int, capacity_bytes: int) -> list[PlannedJob]:
    """``count`` distinct jobs that can train, in random order; the same for the same arguments.

    Candidates are drawn over all features.  Slices of the logarithm of memory then give one job
    each in turn, until there are enough.

    Args:
        recipe: the search space.
        count: how many.
        seed: of the draw and the order.
        capacity_bytes: memory of the card, for the recipe's percentages.

    Raises:
        InvalidRequestError: when the space does not hold so many jobs between its memory limits.
    """
    low = math.log2(recipe.memory_from(capacity_bytes))
    high = math.log2(recipe.memory_to(capacity_bytes))
    if high <= low:
        raise InvalidRequestError(
            f"recipe '{recipe.name}' spans no memory on this card: memory.to lies below memory.from",
            "memory",
        )
    generator = np.random.default_rng(seed)
    slice_of: dict[PlannedJob, int] = {}
    for _ in range(_MAX_ROUNDS):
        before = len(slice_of)
        for planned in _candidates(recipe, generator):
            position = (math.log2(rough_bytes(planned)) - low) / (high - low)
            if 0 <= position < 1:
                slice_of[planned] = int(position * MEMORY_SLICES)
        is_exhausted = len(slice_of) < 1.01 * before
        if len(slice_of) >= _CANDIDATES_PER_JOB * count or is_exhausted:
            break
    if len(slice_of) < count:
        raise InvalidRequestError(
            f"recipe '{recipe.name}' gave only {len(slice_of)} distinct jobs that can train: widen its ranges or ask for fewer",
            "jobs",
        )
    turns: Counter[int] = Counter()
    turn_of: dict[PlannedJob, int] = {}
    for planned, memory_slice in slice_of.items():
        turn_of[planned] = turns[memory_slice]
        turns[memory_slice] += 1
    chosen = sorted(turn_of, key=turn_of.__getitem__)[:count]
    return [chosen[index] for index in generator.permutation(count)]


def _candidates(recipe: Recipe, generator: np.random.Generator) -> Iterator[PlannedJob]:
    """Random jobs that can train and do not need too many operations, the uniform ones first."""
    dimensions = recipe.features | recipe.options
    is_range = np.array([isinstance(dimension, Range) for dimension in dimensions.values()])
    points = generator.random((_POINTS, len(dimensions)))
    tilts = np.repeat(_TILTS, _POINTS // len(_TILTS))[:, None]
    for point in np.where(is_range, points ** (1 / tilts), points).tolist():
        values = {
            name: dimension.value(position)
            for (name, dimension), position in zip(dimensions.items(), point, strict=True)
        }
        planned = _compose(recipe, values)
        if planned is not None and operations_per_step(planned) <= recipe.max_operations:
            yield planned


def _compose(recipe: Recipe, values: Mapping[str, Any]) -> PlannedJob | None:
    """The job of one point, or ``None`` when it cannot train."""
    options = Options(**{name: values[name] for name in recipe.options})
    members = family(recipe.family)
    architecture = members.compose({name: values[name] for name in recipe.features})
    kernel = getattr(architecture, "attention_kernel", None)
    if can_run(options, kernel) and members.can_train(architecture, options.batch_size):
        return PlannedJob(recipe.family, architecture, options)
    return None
