"""The documents are true: they build without a broken link, show what the commands print, and name
what exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gpumemnet
from gpumemnet.cli.commands import application, load
from tests.docs.documents import PAGES, ROOT, Marked, marked, shell_commands, text_of, without_frame
from tests.nightly import nightly

BIN = Path(sys.executable).parent


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--quiet",
            "--strict",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loaded = re.findall(
            r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="(https?:)?//', page.read_text("utf-8")
        )
        assert not loaded, f"{page} loads something from another host"


@cache
def printed(command: str) -> tuple[str, ...]:
    """The lines that a command prints, without frames."""
    words = shlex.split(command)
    done = subprocess.run(
        [
            str(BIN / words[0])
            if (BIN / words[0]).exists()
            else shutil.which(words[0]) or words[0],
            *words[1:],
        ],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return tuple(without_frame(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "shown",
    [*marked("output"), *nightly(marked("nightly output"))],
    ids=lambda shown: f"{shown.page}: {shown.argument}",
)
def test_the_command_prints_what_the_page_shows(shown: Marked) -> None:
    given = iter(printed(shown.argument))
    assert shown.lines
    for line in shown.lines:  # a page may leave out lines, and what stands at the right of one
        assert any(f"{each} ".startswith(f"{line} ") for each in given), (
            f"{line!r} is not printed, or not in this place"
        )


@pytest.mark.parametrize("shown", marked("runs"), ids=lambda shown: shown.page)
def test_the_program_prints_what_its_comment_says(shown: Marked) -> None:
    done = subprocess.run(
        [sys.executable, "-c", shown.text], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == re.findall(r"# (.*)$", shown.text)[-1].split()


def test_the_columns_of_a_file_of_predictions_are_those_of_the_guide(tmp_path: Path) -> None:
    text = text_of("docs/how-to/files.md")
    table = text[text.index("| column |") :].partition("\n\n")[0].splitlines()[2:]
    columns = [name for row in table for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    (tmp_path / "jobs.jsonl").write_text(
        json.dumps(json.loads(text_of("examples/mlp_job.json"))) + "\n"
    )
    printed(f"gpumemnet predict {tmp_path}/jobs.jsonl --out {tmp_path}/predictions.csv")
    assert (tmp_path / "predictions.csv").read_text().splitlines()[0].split(",") == columns


@pytest.mark.parametrize(
    "shown", marked("table"), ids=lambda shown: f"{shown.page}: {shown.argument}"
)
def test_the_table_is_that_of_the_report(shown: Marked) -> None:
    assert shown.text.strip() in text_of(shown.argument)


@cache
def options_of_commands() -> dict[tuple[str, ...], set[str]]:
    """Every command as its words → its options."""
    found: dict[tuple[str, ...], set[str]] = {}

    def walk(path: tuple[str, ...], command: Any) -> None:
        command = load(path[0]) if len(path) == 1 else command
        found[path] = {
            name
            for each in command.params
            for name in (*each.opts, *each.secondary_opts)
            if name.startswith("-")
        }
        for name, child in getattr(command, "commands", {}).items():
            walk((*path, name), child)

    walk((), application())
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_and_options_of_a_page_exist(page: str) -> None:
    known = options_of_commands()
    for words in shell_commands(page):
        path = max(
            (words[:length] for length in range(len(words) + 1) if tuple(words[:length]) in known),
            key=len,
        )
        rest = words[len(path) :]
        has_children = any(
            len(each) > len(path) and each[: len(path)] == tuple(path) for each in known
        )
        plain = [word for word in rest if not word.startswith("-") and word not in ("…", "COMMAND")]
        assert path or not plain, f"gpumemnet {' '.join(words)}: no such command"
        assert not has_children or not path or not plain, (
            f"gpumemnet {' '.join(words)}: no such command"
        )
        for word in rest[: rest.index("--")] if "--" in rest else rest:
            if re.fullmatch(r"-{1,2}[a-z][\w-]*(=.*)?", word):
                assert word.split("=")[0] in known[tuple(path)] | {"--help"}, (
                    f"gpumemnet {' '.join(words)}: no option {word}"
                )


@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_are_short(page: str) -> None:
    is_code = False
    for number, line in enumerate(text_of(page).splitlines(), 1):
        is_code ^= line.startswith("```")
        assert is_code or len(line) <= 124 or line.startswith(("|", "!", "<!--")), (
            f"{page}:{number} has {len(line)} columns"
        )


FOLDERS = (
    "gpumemnet|dataset_builder|models|service|examples|docs|deploy|integrations|benchmarks|tests"
)


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)(?::\w+)?`", text_of(page)):
        assert (ROOT / path).exists(), f"{page} names {path}"


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere_in_a_clone(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page)):
        assert ":" in target or (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.nightly
@pytest.mark.parametrize("shown", marked("files"), ids=lambda shown: shown.argument)
def test_the_files_of_a_journey_are_those_of_the_profiler(shown: Marked) -> None:
    listed = subprocess.run(
        [sys.executable, "docs/journeys.py", shown.argument],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert listed.returncode == 0, listed.stderr
    known = {line.strip() for line in listed.stdout.splitlines()[1:]}
    assert known == set(re.findall(r"^\| `([^`]+)`", shown.text, re.MULTILINE))


def test_the_reference_of_python_has_every_public_name() -> None:
    shown = set(
        re.findall(r"^::: gpumemnet\.(\w+)$", text_of("docs/reference/python.md"), re.MULTILINE)
    )
    assert shown == set(gpumemnet.__all__)


def test_make_knows_the_targets_that_documents_name() -> None:
    makefile = text_of("Makefile")
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make (\w+)", text_of(page), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"
