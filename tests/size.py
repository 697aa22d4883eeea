"""Counts files and code tokens by folder: ``python -m tests.size [DEPTH]`` prints them.

Comments, docstrings, blank lines and imports do not count, so nothing is saved by longer lines,
shorter names or fewer explanations.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("gpumemnet", "dataset_builder", "models", "service")
COUNTED_APART: Final = ("gpumemnet/named", "gpumemnet/launchers")
"""Folders with a budget of their own, whose tokens are not those of ``product``."""
_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


class Size(NamedTuple):
    """Files and code tokens of each folder; ``product`` is that of the four packages, its tokens
    without those of :data:`COUNTED_APART`."""

    files: Counter[str]
    tokens: Counter[str]


def code_tokens(text: str) -> int:
    """Tokens of code in a Python file."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_docstring = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(each.type not in _NO_CODE and each.start[0] not in left_out for each in tokens)


def size(depth: int = 1) -> Size:
    """Size of the files that git knows, by folder down to ``depth``."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = Size(Counter(), Counter())
    for name in listed.stdout.split():
        if not (ROOT / name).exists():  # deleted, and not committed yet
            continue
        tokens = code_tokens((ROOT / name).read_text("utf-8"))
        *folders, _ = name.split("/")
        rooms = {"/".join(folders[:level]) for level in range(1, min(depth, len(folders)) + 1)}
        if folders and folders[0] in PRODUCT:
            rooms.add("product")
        apart = next((room for room in COUNTED_APART if name.startswith(f"{room}/")), None)
        for room in rooms | ({apart} if apart else set()):
            found.files[room] += 1
            if not (apart and room == "product"):
                found.tokens[room] += tokens
    return found


if __name__ == "__main__":
    measured = size(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for room in sorted(measured.files):
        sys.stdout.write(f"{room:40}{measured.files[room]:6}{measured.tokens[room]:9,}\n")
