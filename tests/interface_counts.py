"""Counts what users must know: commands, options, HTTP operations and settings, from the programs
themselves.

``python tests/interface_counts.py`` prints the counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_METHODS = ("get", "put", "post", "delete", "patch", "head", "options")


def leaves(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every command that runs something, with its words."""
    if not (below := getattr(command, "commands", None)):
        yield path, command
    else:
        for name, one in below.items():
            yield from leaves((*path, name), one)


def all_commands() -> dict[tuple[str, ...], Any]:
    """Every command of ``gpumemnet`` that runs something."""
    from gpumemnet.cli.commands import ENTRIES, load

    return {words: one for name in ENTRIES for words, one in leaves((name,), load(name))}


def option_count(command: Any) -> int:
    """Options of one command, without its arguments and ``--help``."""
    return sum(each.param_type_name == "option" for each in command.params)


def counts() -> dict[str, int]:
    """How many there are of each."""
    from service.app import create_app
    from service.settings import Settings

    commands = all_commands()
    paths = create_app(Settings(database_url="off")).openapi()["paths"]
    return {
        "commands": len(commands),
        "options": sum(map(option_count, commands.values())),
        "operations": sum(name in _METHODS for each in paths.values() for name in each),
        "settings": len(Settings.model_fields),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for name, count in counts().items():
        sys.stdout.write(f"{count:5} {name}\n")
