"""Compares traces of scripts with whole runs that have true values: peaks of what tensors take.

``python benchmarks/true_values.py SCRIPT…`` needs no GPU.  Each script runs to its end in plain
Python.  Tensors of the CPU that are marked play those of the GPU: what is moved or made there is
marked, and so is what an operator makes from it.  Weak references tell when their bytes are
released.  The same script is then traced.  Both sides count the bytes asked for, without workspaces
of libraries and scratch memory of kernels.

The CPU runs other kernels than CUDA.  Dropout takes here what it takes on CUDA, sums of gradients
are formed in place, and stacks of recurrent layers keep cuDNN's reserve space.  Attention with a
mask may differ by some tensors of its size.  Autocast, streams, several GPUs and compiled code are
not played.  Scripts should be small, and seed what they draw.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import walk_stack
from typing import Any, Final
from weakref import finalize

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.serialization import register_package

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gpumemnet.extract.known_layouts import argument_tensors  # noqa: E402
from gpumemnet.gpu import device_profile  # noqa: E402
from gpumemnet.physics.saved_tensors import reserve_elements  # noqa: E402
from gpumemnet.sandbox.process import NO_COMPILING  # noqa: E402
from gpumemnet.torch_private.names import (  # noqa: E402
    DispatchMode,
    aten,
    backward_runs,
    dense_parts,
    reference_counts,
    replaced,
    storage_id,
)
from gpumemnet.torch_private.script import cpu_generator, device_constructors  # noqa: E402
from gpumemnet.tracing.operators.rules import Platform  # noqa: E402
from gpumemnet.tracing.script.simulated_cuda import (  # noqa: E402
    GPU,
    Streams,
    cuda_functions,
    cuda_tensor_types,
)
from gpumemnet.units import MIB  # noqa: E402

ADD: Final = aten.add.Tensor
IN_PLACE: Final = {
    ADD: aten.add_.Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""What the engine writes into its own tensors, unless a mode is entered."""
LIKE: Final = (
    *("new_tensor", "new_zeros", "new_ones", "zeros_like", "ones_like"),
    "as_tensor",
)
"""Functions that make a tensor where their first argument is, unless a device is named."""
WITHOUT_WORKSPACES: Final = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "gpumemnet.tracing.recorder": return None
        found = PathFinder.find_spec(name, path)
        execute = found.loader.exec_module
        def changed(module):
            execute(module)
            module.blas_workspace = lambda *call: None
            module.scratch = lambda *call: ()
        found.loader.exec_module = changed
        return found
sys.meta_path.insert(0, Finder())
"""
"""A ``sitecustomize.py`` for the processes of a trace, so that only tensors count."""


class PlayedGpu(DispatchMode):
    """Counts the bytes of those tensors of the CPU that play tensors of the GPU.

    Args:
        script: whose lines are told.
    """

    def __init__(self, script: Path) -> None:
        super().__init__()
        self._script = str(script)
        self._sizes: dict[int, int] = {}
        self._place: bool | None = None
        self.now = self.peak = self.line = 0

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the GPU."""
        return any(storage_id(part) in self._sizes for part in dense_parts(tensor))

    def mark(self, tensor: Tensor) -> Tensor:
        """Put the storages of ``tensor`` on the GPU, unless they are there."""
        for part in dense_parts(tensor):
            storage, key = part.untyped_storage(), storage_id(part)
            if key not in self._sizes:
                self._sizes[key] = 0
                finalize(storage, self._released, key)
            self.now += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
        if self.now > self.peak:
            lines = (
                line for frame, line in walk_stack(None) if frame.f_code.co_filename == self._script
            )
            self.peak, self.line = self.now, next(lines, 0)
        return tensor

    def _released(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    @contextmanager
    def placing(self, on_gpu: bool) -> Iterator[None]:
        """Context in which what is made is on the GPU, or is not counted."""
        before, self._place = self._place, on_gpu
        try:
            yield
        finally:
            self._place = before

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and mark what it makes on the GPU."""
        inputs = argument_tensors(args, kwargs)
        given = {storage_id(part) for tensor in inputs for part in dense_parts(tensor)}
        engine = _engine_run_backward.__code__
        if (
            sys._getframe(2).f_code is engine
            and not torch.is_grad_enabled()
            # nobody else has the sum, and sparse ones are never formed in place
            and (func is not ADD or (not args[0].is_sparse and reference_counts(args[0]) == (4, 2)))
        ):
            func = IN_PLACE.get(func, func)
        result = func(*args, **kwargs)
        on_gpu = self._place
        if on_gpu is None:  # gradients that the engine makes of nothing have no input
            on_gpu = bool(given & self._sizes.keys()) or (not inputs and backward_runs())
        outputs = argument_tensors([result], {})  # the sizes of packed batches are on the host
        for tensor in outputs[: 1 if func is aten._pack_padded_sequence.default else None]:
            for part in dense_parts(tensor):
                key = storage_id(part)
                if key in self._sizes or (on_gpu and key not in given):
                    self.mark(part)  # again, as its size may be another
        return result


class Recurrent(torch.autograd.Function):
    """Runs a stack of recurrent layers as one operator that keeps cuDNN's reserve space."""

    @staticmethod
    def forward(ctx: Any, gpu: PlayedGpu, layers: Any, reserve: Tensor, *tensors: Tensor) -> Any:
        with gpu.placing(False), torch.enable_grad():
            leaves = [each.detach().requires_grad_(each.requires_grad) for each in tensors]
            results = layers(leaves)
        ctx.gpu, ctx.graph = gpu, (leaves, results)
        ctx.save_for_backward(reserve, *tensors)
        return tuple(gpu.mark(result.detach()) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        leaves, results = ctx.graph
        with ctx.gpu.placing(False):
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(results, trained, gradients))
        del leaves, results, ctx.graph
        needed = ctx.needs_input_grad[3:]
        return *[None] * 3, *(ctx.gpu.mark(next(found)) if each else None for each in needed)


def play(gpu: PlayedGpu) -> None:
    """Let PyTorch answer as if ``gpu`` were there, until the process ends."""
    move, deep_copy, get_device = Tensor.to, Tensor.__deepcopy__, Tensor.device
    drop, attend, with_type = torch.dropout, F.scaled_dot_product_attention, Tensor.type

    def to(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        copies = named.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype
        args = tuple(GPU if type(arg) is int else arg for arg in args)
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **named)
        here = gpu.holds(tensor)
        there = here if device is None else device.type == "cuda"
        with gpu.placing(there):
            return move(
                tensor,
                dtype=dtype or tensor.dtype,
                copy=copies or here != there,
                memory_format=layout or torch.preserve_format,
            )

    def constructed(make: Any) -> Any:
        @wraps(make)
        def made(*args: Any, **named: Any) -> Any:
            device = named.pop("device", None)
            named.pop("pin_memory", None)
            if device is None and make.__name__ in LIKE:
                return make(*args, **named)
            on_gpu = type(device) is int or "cuda" in str(device)
            if make.__name__.startswith("as"):
                return to(make(*args, **named), GPU if on_gpu else "cpu")
            with gpu.placing(on_gpu):
                result = make(*args, device="cpu", **named)
            return gpu.mark(result) if on_gpu else result

        return made

    def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
        if train and 0 < p < 1 and gpu.holds(tensor):
            return torch.native_dropout(tensor, p, True)[0]
        return drop(tensor, p, train)

    def attention(*args: Any, **named: Any) -> Any:
        if gpu.holds(args[0]):  # with dropout, the CPU takes other kernels
            args, named = args[:4], {**named, "dropout_p": 0.0}
        return attend(*args, **named)

    def placed(make: Any) -> Any:
        def made(*args: Any, **named: Any) -> Any:
            inputs = argument_tensors(args, named)
            with gpu.placing(any(map(gpu.holds, inputs))):  # C++ makes it from nothing marked
                return make(*args, **named)

        return made

    def typed(tensor: Tensor, *args: Any) -> Any:
        return to(tensor, GPU, args[0].dtype) if "cuda" in str(args) else with_type(tensor, *args)

    def recurrent(kind: str, original: Any, *args: Any) -> Any:
        is_packed = isinstance(args[3], list | tuple)
        batch, *sizes = args[: 1 + is_packed]
        states, weights, *options = args[1 + is_packed :]
        given = [states] if isinstance(states, Tensor) else list(states)
        count = len(given)

        def layers(tensors: Any) -> Any:
            state = tensors[1] if isinstance(states, Tensor) else tensors[1 : count + 1]
            return original(tensors[0], *sizes, state, tensors[count + 1 :], *options)

        if not gpu.holds(batch):
            return original(*args)
        elements = 0
        if options[3]:
            samples, hidden = given[0].shape[1:]
            steps = len(sizes[0]) * samples if is_packed else batch.shape[:2].numel()
            elements = reserve_elements(
                kind, steps=steps, hidden=hidden, layers=options[1], directions=1 + options[4]
            )
        reserve = batch.new_empty(elements)
        return Recurrent.apply(gpu, layers, reserve, batch, *given, *weights)  # type: ignore[no-untyped-call]

    def loaded(storage: Any, place: str) -> Any:
        if not place.startswith("cuda"):
            return None
        gpu.mark(torch.empty(0, dtype=torch.uint8).set_(storage))
        return storage

    def tag(storage: Any) -> str | None:
        return "cuda:0" if storage._cdata in gpu._sizes else None

    def copied(tensor: Tensor, memo: Any) -> Tensor:
        copy: Tensor = deep_copy(tensor, memo)  # type: ignore[no-untyped-call]
        return gpu.mark(copy) if gpu.holds(tensor) else copy

    register_package(5, tag, loaded)
    for name in {*LIKE, *(make.__name__ for make in device_constructors())}:
        for owner in (torch, Tensor):
            if hasattr(owner, name):
                setattr(owner, name, constructed(getattr(owner, name)))
    of_tensors = {
        "to": to,
        "type_as": to,
        "type": typed,
        "cuda": lambda tensor, *args, **named: to(tensor, GPU),
        "cpu": lambda tensor, *args, **named: to(tensor, "cpu"),
        "device": property(lambda each: GPU if gpu.holds(each) else get_device.__get__(each)),
        "is_cuda": property(gpu.holds),
        "pin_memory": lambda tensor, *args: tensor,
        "__deepcopy__": copied,
    }
    recurrent_kinds = {
        kind: partial(recurrent, kind, getattr(torch._VF, kind)) for kind in ("lstm", "gru")
    }
    replacements: Any = (
        (Tensor, of_tensors),
        (torch, {"dropout": dropout}),
        (
            torch._VF,
            {
                "dropout": dropout,
                "_pad_packed_sequence": placed(torch._VF._pad_packed_sequence),
                **recurrent_kinds,
            },
        ),
        (F, {"scaled_dot_product_attention": attention, "one_hot": placed(F.one_hot)}),
        (torch._C._nn, {"pad_sequence": placed(torch._C._nn.pad_sequence)}),
    )
    for place, functions in replacements:
        for name, function in functions.items():
            setattr(place, name, function)


def run(script: Path, out: Path) -> None:
    """Run a script with true values in this process; write its peak to ``out``."""
    gpu, nothing = PlayedGpu(script), lambda *_: None
    functions = cuda_functions(
        Platform(device=device_profile("H200")), Streams(nothing), lambda: gpu.now, nothing, 1
    )
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    with replaced((*functions, *cuda_tensor_types(), ("torch:Generator", cpu_generator(GPU)))):
        play(gpu)
        try:
            with gpu:
                runpy.run_path(str(script), run_name="__main__")
        finally:
            out.write_text(json.dumps({"bytes": gpu.peak, "line": gpu.line}))


def compare(script: Path) -> tuple[Any, Any]:
    """Return what a script takes with true values, and the answer of its trace."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "true.json"
        (Path(folder) / "sitecustomize.py").write_text(WITHOUT_WORKSPACES)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"), str(ROOT))))

        def python(*arguments: object, **variables: str) -> Any:
            return subprocess.run(
                [sys.executable, *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=300,
                cwd=script.parent,
                env={**os.environ, NO_COMPILING: "1", **variables},
                check=False,
            )

        ran = python(__file__, "--out", out, script)
        true = json.loads(out.read_text()) if out.exists() else {}
        true["error"] = ran.stderr[-300:] if ran.returncode else ""
        trace = ("gpumemnet", "trace", "--gpu", "H200", "--json", "--", "python", script)
        done = python("-m", *trace, PYTHONPATH=path)
    traced = json.loads(done.stdout) if done.stdout else {"error": done.stderr[-500:]}
    return true, traced


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        run(arguments.scripts[0], arguments.out)
        return
    table = Table("script", "true MiB", "at line", "traced MiB", "difference", "errors and notes")
    for script in arguments.scripts:
        true, traced = compare(script.resolve())
        peak, found = true.get("bytes", 0), traced.get("requested_bytes", 0)
        notes = [true["error"], traced.get("error"), *traced.get("notes", [])]
        table.add_row(
            script.name,
            f"{peak / MIB:,.2f}",
            str(true.get("line")),
            f"{found / MIB:,.2f}",
            f"{found / max(peak, 1) - 1:+.1%}",
            "\n".join(filter(None, notes)),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
