"""Private names of PyTorch: the installed version has them, a missing one is named, and nothing
else touches one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gpumemnet
from gpumemnet.errors import UnsupportedTorchError
from gpumemnet.torch_private.names import aten

ROOT = Path(gpumemnet.__file__).parent
PRIVATE = ROOT / "torch_private"
FILES = sorted(
    file
    for package in ("extract", "tracing", "sandbox", "allocator", "planner")
    for file in (ROOT / package).rglob("*.py")
    if PRIVATE not in file.parents
)
OF_PYTHON = frozenset({"_replace", "_getframe", "_exit"})
"""Names with an underscore that Python itself documents."""


def traced() -> gpumemnet.TraceAnswer:
    return gpumemnet.trace(nn.Linear(4, 4), torch.empty(2, 4, device="meta"), optimizer="sgd")


def test_an_untested_version_is_traced_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = traced()
    assert expected.notes == ()
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    answer = traced()
    assert answer.expected_bytes == expected.expected_bytes
    (note,) = answer.notes
    assert note.startswith(
        "Traced with PyTorch 2.99.1+cpu, which this version of gpumemnet was not tested with"
    )


def test_a_missing_name_stops_a_trace_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    with pytest.raises(
        UnsupportedTorchError,
        match=r"torch\._C\._current_autograd_node is missing .*Install a tested PyTorch",
    ):
        traced()


def test_names_for_several_gpus_do_not_stop_a_trace_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.parallel.DistributedDataParallel, "_pre_forward")
    assert traced().notes == ()
    with pytest.raises(
        UnsupportedTorchError, match=r"DistributedDataParallel\._pre_forward is missing"
    ):
        gpumemnet.trace(nn.Linear(4, 4), torch.empty(2, 4, device="meta"), parallel="ddp", ranks=2)


def test_an_operator_that_is_missing_is_named() -> None:
    assert aten.add is torch.ops.aten.add
    with pytest.raises(
        UnsupportedTorchError, match=r"torch\.ops\.aten\.no_such_operator is missing"
    ):
        aten.no_such_operator  # noqa: B018


def private_uses(tree: ast.AST) -> Iterator[str]:
    """What a module does with PyTorch that it should leave to ``torch_private``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            if any(
                part.startswith("_")
                for part in (*str(node.module).split("."), *(each.name for each in node.names))
            ):
                yield f"line {node.lineno}: from {node.module} import …"
        elif isinstance(node, ast.Import):
            yield from (
                f"line {node.lineno}: import {each.name}"
                for each in node.names
                if each.name.startswith("torch._")
            )
        elif (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls", "aten")
            parent = (
                isinstance(owner, ast.Call)
                and isinstance(owner.func, ast.Name)
                and owner.func.id == "super"
            )
            if not (own or parent or node.attr in OF_PYTHON):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "patch",
            "patch.object",
            "mock.patch.object",
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node).startswith("torch.")
        ):
            yield f"line {node.lineno}: {ast.unparse(node)} = …"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_other_module_touches_a_private_name(file: Path) -> None:
    assert list(private_uses(ast.parse(file.read_text("utf-8")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch._C import DispatchKey",
        "from torch.nn import _reduction",
        "import torch._dynamo",
        "torch._C._get_sequence_nr()",
        "tensor._use_count()",
        "torch.load = print",
        "patch.object(torch, 'save', print)",
    ],
)
def test_such_uses_are_found(text: str) -> None:
    assert list(private_uses(ast.parse(text)))


@pytest.mark.parametrize("file", sorted(PRIVATE.glob("*.py")), ids=lambda file: file.stem)
def test_the_list_depends_on_errors_alone(file: Path) -> None:
    modules = [
        node.module or ""
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom)
    ]
    ours = {module for module in modules if module.startswith("gpumemnet")}
    assert all(
        module == "gpumemnet.errors" or module.startswith("gpumemnet.torch_private")
        for module in ours
    )
