"""Lets scripts of others run on made-up data, and with a torchvision that was built for another PyTorch.

Python imports this file at its start from ``PYTHONPATH``.  Two modules of torchvision are changed when a script imports them: the
package itself names two operators on import, which a build for another PyTorch lacks; and its data sets compare checksums, which
made-up data do not have.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _name_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        with suppress(RuntimeError):
            library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    _kept.append(library)


class _Torchvision(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            _name_operators()
        if name != "torchvision.datasets.utils":
            return None
        found = PathFinder.find_spec(name, path)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def changed(module: Any) -> None:
                execute(module)
                module.check_integrity = lambda path, md5=None: True

            found.loader.exec_module = changed  # type: ignore[method-assign]
        return found


_kept: list[Any] = []
sys.meta_path.insert(0, _Torchvision())
