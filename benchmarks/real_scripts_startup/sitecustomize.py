"""Lets scripts of others run on made-up data, and with a torchvision that was built for another
PyTorch.

Python imports this file at its start from ``PYTHONPATH``.  Some modules are changed when a script
imports them: torchvision names two operators on import, which a build for another PyTorch lacks;
its data sets compare checksums, which made-up data do not
have; ``requests.get`` answers with the file that ``REAL_SCRIPTS_DOWNLOAD`` names;
``torch.hub.list`` finds nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def _name_operators() -> None:
    import torch

    found = PathFinder.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    with suppress(OSError):  # it was built for another PyTorch
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        with suppress(RuntimeError):
            library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    _kept.append(library)


def _without_checksums(module: Any) -> None:
    module.check_integrity = lambda path, md5=None: True


def _without_network(module: Any) -> None:
    file = os.environ.get("REAL_SCRIPTS_DOWNLOAD")
    if file:
        module.get = lambda url, **options: nullcontext(SimpleNamespace(raw=Path(file).open("rb")))  # noqa: SIM115


def _without_hub(module: Any) -> None:
    module.list = lambda *args, **options: []


_CHANGES = {
    "torchvision.datasets.utils": _without_checksums,
    "requests": _without_network,
    "torch.hub": _without_hub,
}


class _Changed(MetaPathFinder):
    """Finds the modules that are changed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            _name_operators()
        change = _CHANGES.get(name)
        if change is None:
            return None
        found = PathFinder.find_spec(name, path)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def changed(module: Any) -> None:
                execute(module)
                change(module)

            found.loader.exec_module = changed  # type: ignore[method-assign]
        return found


_kept: list[Any] = []
sys.meta_path.insert(0, _Changed())
