"""``%%memory`` for notebooks: the memory that a training cell will take on a GPU, traced as a
script is.

The cell does not run in the notebook.  It runs in a child process, on a simulated GPU, after the
earlier cells that it needs: those that define a name that it uses, or change one, as
``model.to("cuda")`` does.
"""

from __future__ import annotations

import ast
import io
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpumemnet.cli import main

if TYPE_CHECKING:
    from gpumemnet.tracing.result import TraceAnswer

_SCRIPT: Final = """\
import os, sys

sys.path.insert(0, os.getcwd())
for _file in {files!r}:
    with open(_file, encoding="utf-8") as _code:
        _code = compile(_code.read(), _file, "exec")
    exec(_code, globals())
"""


class Shell(Protocol):
    """What is used of IPython's ``InteractiveShell``."""

    user_ns: dict[str, Any]

    def transform_cell(self, raw_cell: str) -> str:
        """Return a cell as Python, with its magics as calls of ``get_ipython()``."""
        ...

    def register_magic_function(
        self, func: Callable[..., Any], magic_kind: str, magic_name: str
    ) -> None:
        """Add a magic."""
        ...


def load_ipython_extension(shell: Shell) -> None:
    """Add the magic ``%%memory``; IPython calls this for ``%load_ext gpumemnet``."""

    def memory(line: str, cell: str) -> TraceAnswer | None:
        """Show what memory this training cell takes on a GPU, without running it here.

        The line takes the options of "gpumemnet trace --script", such as --gpu T4 or
        --largest-batch.
        """
        return memory_of_cell(line, shell.transform_cell(cell), shell.user_ns.get("In", []))

    shell.register_magic_function(memory, "cell", "memory")


def memory_of_cell(line: str, cell: str, earlier: Sequence[str]) -> TraceAnswer | None:
    """Return the memory of training as in ``cell``; ``None`` after an error, which is printed to
    standard error.

    Args:
        line: options of ``gpumemnet trace --script``.
        cell: the code.
        earlier: the code of the notebook's earlier cells by their number, as in ``In``.
    """
    from gpumemnet.tracing.result import answer_from_dict

    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name, code in (
            *((f"In[{number}]", earlier[number]) for number in needed_cells(cell, earlier)),
            ("cell", cell),
        ):
            file = Path(folder) / f"{name}.py"
            file.write_text(_without_magics(code), encoding="utf-8")
            files.append(str(file))
        script = Path(folder) / "notebook.py"
        script.write_text(_SCRIPT.format(files=files), encoding="utf-8")
        with redirect_stdout(io.StringIO()) as printed:
            status = main(["trace", "--script", str(script), "--json", *shlex.split(line)])
    return None if status else answer_from_dict(json.loads(printed.getvalue()))


def needed_cells(cell: str, earlier: Sequence[str]) -> list[int]:
    """Return the numbers of the earlier cells that define or change names that ``cell`` needs,
    directly or through others.

    Cells that are no Python are not needed.
    """
    tree = _parsed(cell)
    needed = set() if tree is None else _loaded(tree) - _stored(tree)
    found = []
    for number in reversed(range(len(earlier))):
        tree = _parsed(earlier[number])
        if tree is not None and needed & (_stored(tree) | _changed(tree)):
            found.append(number)
            needed |= _loaded(tree) | _changed(tree)
    return found[::-1]


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(_without_magics(code))
    except SyntaxError:
        return None


def _without_magics(code: str) -> str:
    """Return ``code`` with its lines, but without statements that call ``get_ipython()``."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return code  # the child says what is wrong
    lines = code.splitlines()
    for statement in tree.body:
        if any(
            isinstance(node, ast.Name) and node.id == "get_ipython" for node in ast.walk(statement)
        ):
            for number in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
                lines[number] = ""
    return "\n".join(lines) + "\n"


def _loaded(tree: ast.Module) -> set[str]:
    loaded = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return loaded | _updated(tree)


def _updated(tree: ast.Module) -> set[str]:
    """Return the names of ``steps += 1`` and the like, which must be there before."""
    return {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }


def _stored(tree: ast.Module) -> set[str]:
    """Return the names that the code defines: variables, functions, classes and imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names - _updated(tree)


def _changed(tree: ast.Module) -> set[str]:
    """Return the names whose objects a statement of the cell changes: ``model.to("cuda")``,
    ``options["lr"] = 1``."""
    return {name for statement in tree.body for name in _roots(statement)}


def _roots(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        targets: list[ast.expr] = [statement.value.func]
    elif isinstance(statement, ast.Assign):
        targets = statement.targets
    else:
        targets = [statement.target] if isinstance(statement, ast.AugAssign) else []
    for target in targets:
        root = target
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root is not target:
            yield root.id
