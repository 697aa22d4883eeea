"""All commands and options, frozen in ``options.txt``, so that no release renames one by accident.

After a change that is meant::

    python tests/gpumemnet/cli/test_options_snapshot.py > tests/gpumemnet/cli/options.txt
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from gpumemnet.cli.commands import ENTRIES, LazyCommand

SNAPSHOT = Path(__file__).with_name("options.txt")


def commands() -> Iterator[tuple[str, Any]]:
    for entry in ENTRIES:
        yield from _commands(f"gpumemnet {entry.name}", LazyCommand(entry).loaded())


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if not below:
        yield path, command
        return
    for name, one in below.items():
        yield from _commands(f"{path} {name}", one)


def options() -> str:
    lines = []
    for path, command in commands():
        lines.append(path)
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            names = (
                ", ".join((*parameter.opts, *parameter.secondary_opts))
                if is_option
                else parameter.display_name_raw
            )
            kind = parameter.metavar or "" if is_option else ""
            lines.append(
                f"    {names} {kind}".rstrip() + (" (required)" if parameter.required else "")
            )
    return "\n".join(lines) + "\n"


def test_the_options_are_those_of_the_snapshot() -> None:
    assert options() == SNAPSHOT.read_text("utf-8"), "see the top of this file"


def test_each_summary_is_the_first_sentence_of_the_command_s_help() -> None:
    for entry in ENTRIES:
        text = " ".join((LazyCommand(entry).loaded().help or "").split())
        assert text.startswith(entry.summary), (entry.name, text)


def test_every_option_says_what_it_is_for() -> None:
    silent = [
        (path, parameter.name)
        for path, command in commands()
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.help
    ]
    assert silent == []


def test_every_command_that_ends_has_a_form_for_programs() -> None:
    assert [
        path
        for path, command in commands()
        if not any("--json" in option.opts for option in command.params)
    ] == ["gpumemnet serve"]


def test_usage_lines_name_arguments_plainly() -> None:
    usages = {
        path: command.collect_usage_pieces(typer.Context(command)) for path, command in commands()
    }
    assert usages["gpumemnet predict"] == ["[OPTIONS]", "JOBS..."]
    assert usages["gpumemnet models"] == ["[OPTIONS]", "[FOLDER...]"]
    assert not [
        path
        for path, pieces in usages.items()
        if "{" in "".join(pieces) or "......" in "".join(pieces)
    ]


if __name__ == "__main__":
    sys.stdout.write(options())
