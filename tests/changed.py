"""Prints the tests that a change is likely to break: ``python tests/changed.py`` is what ``make
check`` hands to pytest.

A change is what differs from the point where this branch left ``main`` and what is not committed
yet, or the last commit where there is neither.  ``tests/`` mirrors the packages, so a module's
tests are found by its path; a test that names a changed file is
taken too.  This is a quick look: a change can break tests far from it, and ``make test`` runs them
all.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("gpumemnet", "dataset_builder", "models", "service", "research")
_NAMED_BY_TESTS: Final = ("benchmarks", "deploy", "docs", "examples", "integrations")
"""Folders without a mirror: their tests are those that name the file."""
_EVERYWHERE: Final = ("__init__.py", "README.md")
"""Names that say nothing, as many files have them."""


def changed_files(root: Path) -> list[str]:
    """Paths of this change, relative to the repository."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout.splitlines() if done.returncode == 0 else []

    fork = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    changed = {
        *git("diff", "--name-only", fork[0]),
        *git("ls-files", "--others", "--exclude-standard"),
    }
    return sorted(changed or git("diff", "--name-only", "HEAD~1"))


def pick_tests(files: Iterable[str], root: Path) -> list[str]:
    """Test files and folders for the changed files, none of them inside another."""
    found = {PurePosixPath(place) for file in files for place in _places(PurePosixPath(file), root)}
    return sorted(
        str(place) for place in found if not any(other in found for other in place.parents)
    )


def _places(file: PurePosixPath, root: Path) -> Iterator[str]:
    if file.parts[0] == "tests":
        if (root / file).is_file() and file.suffix == ".py":
            yield from (
                [str(file)]
                if file.name.startswith("test_")
                else _matching(rf"\b(import|tests[.\w]*\.)\s*{file.stem}\b", root)
            )
        return
    if file.parts[0] in PACKAGES:
        yield from _mirrors(file, root)
    if file.parts[0] in (*PACKAGES, *_NAMED_BY_TESTS) or len(file.parts) == 1:
        yield from () if file.name in _EVERYWHERE else _matching(re.escape(file.name), root)


def _mirrors(file: PurePosixPath, root: Path) -> Iterator[str]:
    """The folder that mirrors a module's, and the tests beside it that are called like the
    folder."""
    folder = PurePosixPath("tests", *file.parent.parts)
    if len(file.parts) == 2:  # a module at the root of its package: not everything below it
        yield from (
            str(path.relative_to(root))
            for path in sorted((root / folder).glob(f"test_{file.stem}*.py"))
        )
    elif (root / folder).is_dir():
        yield str(folder)
    else:
        yield from _mirrors(file.parent, root)
    golden = root / "tests" / "golden"
    if golden.is_dir():  # answers must not change, whatever was changed
        yield str(golden.relative_to(root))


def _matching(pattern: str, root: Path) -> Iterator[str]:
    """Tests whose text has a match for the regular expression."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        if re.search(pattern, path.read_text("utf-8")):
            yield str(path.relative_to(root))


if __name__ == "__main__":
    print(" ".join(pick_tests(changed_files(ROOT), ROOT)))
