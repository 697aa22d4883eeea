"""Rules of the shipped tables: what the values of a configuration change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any


def states(values: Mapping[str, Any], pattern: str) -> bool:
    """Whether one of the values matches a pattern such as ``deepspeed*=*offload*``, in lower case."""
    name, _, value = pattern.partition("=")
    if "*" not in name:
        stated = values.get(name)
        return stated is not None and fnmatchcase(str(stated).lower(), value)
    return any(
        fnmatchcase(f"{each}={stated}".lower(), pattern)
        for each, stated in values.items()
        if stated is not None
    )


def effects(
    rules: Iterable[tuple[str, Mapping[str, Any]]], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The effects of the rules of which the values match all patterns; later rules override earlier ones."""
    found: dict[str, Any] = {}
    for patterns, effect in rules:
        if all(states(values, each) for each in patterns.split()):
            found |= effect
    return found
