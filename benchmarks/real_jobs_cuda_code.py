"""Compares rows of ``traced_real_jobs`` with PyTorch's own CUDA code, job by job: requested,
allocated and reserved bytes.

``python benchmarks/real_jobs_cuda_code.py [--jobs 100] [--seed 0] [--cudnn LIBRARY] [--out
FILE.jsonl]`` needs what ``cuda_code.py`` needs, and timm 1.0.9, torchvision and transformers, but
no GPU.  Rows of the dataset run on the null GPU, each in a process of its own, with their
architecture, options and batch size; the null GPU is an H200, so the trace is for one too. As in
``cuda_code.py``, the workspaces of cuDNN are left out on both sides, or cuDNN states them on both
sides (``--cudnn``). Recurrent layers, whose memory cuDNN states too, are left out.  With ``--out``
a second run continues.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from cuda_code import PEAKS, Peaks, peaks_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from gpumemnet.extract.checkpointing import checkpointed  # noqa: E402
from gpumemnet.extract.module_calls import ModelInputs, inputs_from_example  # noqa: E402
from gpumemnet.gpu import device_profile  # noqa: E402
from gpumemnet.job.dataset import read_dataset  # noqa: E402
from gpumemnet.job.measurement import Measurement  # noqa: E402
from gpumemnet.job.training_job import TrainingOptions  # noqa: E402
from gpumemnet.physics.element_types import (  # noqa: E402
    AUTOCAST_TYPES,
    IMAGE_DIMENSIONS,
    MODEL_TYPES,
    SCALED_PRECISIONS,
)
from gpumemnet.physics.optimizers import torch_call  # noqa: E402
from gpumemnet.tracing.api import TraceOptions  # noqa: E402
from gpumemnet.tracing.losses_and_optimizers import loss_function  # noqa: E402
from gpumemnet.tracing.operators.rules import Platform  # noqa: E402
from research.traces.labels import traced_run  # noqa: E402
from research.traces.real_jobs.campaign import freeze  # noqa: E402
from research.traces.real_jobs.networks import build, sample  # noqa: E402

DATASET = ROOT / "dataset_builder" / "datasets" / "real_runs" / "traced_real_jobs.parquet"
GPU = "H200"
WORKSPACE = "largest_convolution_workspace_bytes"
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=100, help="number of rows, each of another trace"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of rows")
    parser.add_argument("--out", type=Path, help="file that keeps the results")
    parser.add_argument(
        "--cudnn",
        type=Path,
        help="libcudnn.so.9, from 9.8 on, that states the workspaces of convolutions",
    )
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_jobs()
        return
    rows = chosen(arguments.jobs, arguments.seed)
    if arguments.cudnn:  # no kernel runs, so a search keeps any plan
        rows = [row for row in rows if not row.job.options.cudnn_benchmark]
    found = {each["trace"]: each for each in map(json.loads, _lines(arguments.out))}
    left = [row for row in rows if _trace_key(row) not in found]
    for row, real in zip(left, on_null_gpu(left, arguments.cudnn), strict=True):
        result: dict[str, Any] = {
            "trace": _trace_key(row),
            "library": json.loads(row.architecture)["library"],
            **real,
        }
        if "peaks" in real:
            result["traced"] = traced(row, arguments.cudnn)
            if arguments.cudnn and row.traced[WORKSPACE]:
                result["reserved_by_rules"] = traced_run(*_trace_of(row)).reserved_bytes
        found[result["trace"]] = result
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
    print_table([found[_trace_key(row)] for row in rows])


def chosen(count: int, seed: int) -> list[Measurement]:
    """One row each of ``count`` traces, libraries in turn."""
    draw = np.random.default_rng(seed)
    by_library: dict[str, dict[str, list[Measurement]]] = {}
    for row in read_dataset(DATASET):
        if row.status == "ok" and row.architecture_family != "recurrent":
            traces = by_library.setdefault(json.loads(row.architecture)["library"], {})
            traces.setdefault(_trace_key(row), []).append(row)
    queues = [list(draw.permutation(sorted(traces))) for traces in by_library.values()]
    keys = [
        (traces, queue.pop())
        for _ in range(count)
        for traces, queue in zip(by_library.values(), queues, strict=True)
        if queue
    ]
    return [traces[key][int(draw.integers(len(traces[key])))] for traces, key in keys[:count]]


def _trace_key(row: Measurement) -> str:
    key: str = json.loads(row.options)["trace"]
    return key


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path and path.exists() else []


def on_null_gpu(rows: list[Measurement], cudnn: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the ``peaks`` of each row on the null GPU, or its ``error``."""
    from tests.dataset_builder.measure.null_gpu.build import build as build_libraries
    from tests.dataset_builder.measure.null_gpu.build import cudnn_environment, environment

    if not rows:
        return
    with tempfile.TemporaryDirectory() as folder:
        build_libraries(Path(folder))
        variables = (
            os.environ | environment(Path(folder)) | (cudnn_environment(cudnn) if cudnn else {})
        )
        command = [sys.executable, __file__, "--run"]
        with subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            for row in rows:
                frozen = json.loads(row.options)["frozen"]
                job = [
                    json.loads(row.architecture),
                    frozen,
                    row.job.options.job_fields(),
                    row.job.batch_size,
                ]
                child.stdin.write(json.dumps(job) + "\n")
                child.stdin.flush()
                yield json.loads(child.stdout.readline())


def run_jobs() -> None:
    """Run each job that stands on a line of the standard input in a fork, and print its peaks."""
    import torch._dynamo  # noqa: F401  # every optimizer loads it on first use

    warnings.filterwarnings("ignore")
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                answer: dict[str, Any] = {"peaks": run_job(*json.loads(line))}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        print(text or json.dumps({"error": "the process died"}), flush=True)


def run_job(
    document: dict[str, Any], frozen: str, fields: dict[str, Any], batch_size: int
) -> Peaks:
    """Train for a few steps as the trace's loop does; return the peaks of requested, allocated and
    reserved bytes."""
    options = TrainingOptions(**fields)
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    network = build(document)
    freeze(network, frozen)
    _move(network, options, {})
    network.train()
    recomputing = checkpointed(network) if options.checkpointing == "every_block" else nullcontext()
    class_name, arguments = torch_call(options.optimizer, options.optimizer_implementation)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, class_name)(trained, **arguments)
    scaler = torch.amp.GradScaler("cuda", enabled=options.precision in SCALED_PRECISIONS)
    with recomputing:
        for _ in range(STEPS):
            _step(network, document, options, batch_size, optimizer, scaler)
    statistics = torch.cuda.memory_stats()
    requested, allocated, reserved = (int(statistics[f"{peak}_bytes.all.peak"]) for peak in PEAKS)
    return requested, allocated, reserved


def _step(
    network: nn.Module,
    document: dict[str, Any],
    options: TrainingOptions,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    optimizer.zero_grad(set_to_none=True)
    name = AUTOCAST_TYPES.get(options.precision)
    for _ in range(options.gradient_accumulation):
        inputs = targets = None
        inputs = inputs_from_example(sample(document, batch_size), None).mapped(
            lambda tensor: _like(tensor, options)
        )
        targets = (
            [torch.empty(batch_size, dtype=torch.long, device="cuda")]
            if document["library"] in ("timm", "torchvision")
            else []
        )

        def target(
            shape: torch.Size, dtype: torch.dtype, targets: list[Tensor] = targets
        ) -> Tensor:
            return targets[0]

        with torch.autocast(
            "cuda", dtype=getattr(torch, name or "bfloat16"), enabled=name is not None
        ):
            output = network(*inputs.args, **inputs.kwargs)
            loss = loss_function("auto")(output, target)
            if options.gradient_accumulation > 1:
                loss = loss / options.gradient_accumulation
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def _like(tensor: Tensor, options: TrainingOptions) -> Tensor:
    """A tensor on the GPU in the precision and memory format of the model, as ``module.to`` makes
    it."""
    dtype = (
        getattr(torch, MODEL_TYPES[options.precision])
        if options.precision in MODEL_TYPES
        else tensor.dtype
    )
    layout = (
        torch.channels_last
        if options.channels_last and tensor.ndim == IMAGE_DIMENSIONS
        else torch.preserve_format
    )
    typed = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(
        tensor, dtype=typed, device="cuda", memory_format=layout, requires_grad=False
    )


def _move(module: nn.Module, options: TrainingOptions, moved: dict[int, Tensor]) -> None:
    """Move every tensor of ``module`` to the GPU, children first as ``module.to`` does; tied
    weights stay tied."""
    for child in module.children():
        _move(child, options, moved)
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is None:
                continue
            if id(tensor) not in moved:
                fresh = _like(tensor.detach(), options)
                is_parameter = isinstance(tensor, nn.Parameter)
                moved[id(tensor)] = (
                    nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                    if is_parameter
                    else fresh
                )
            own[name] = moved[id(tensor)]  # type: ignore[assignment]


def traced(row: Measurement, cudnn: Path | None) -> Peaks:
    """Return the same peaks of a trace of ``row`` on an H200."""
    return peaks_of(*_trace_of(row), cudnn)


def _trace_of(row: Measurement) -> tuple[nn.Module, ModelInputs, TraceOptions, Platform]:
    document = json.loads(row.architecture)
    network = build(document)
    freeze(network, json.loads(row.options)["frozen"])
    options = TraceOptions(
        **row.job.options.job_fields() | {"attention_kernel": None}, keeps_names=False
    )
    inputs = inputs_from_example(sample(document, row.job.batch_size), None)
    return network, inputs, options, Platform.of(device_profile(GPU), options)


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the share of equal peaks for each library, and what went wrong."""
    print(
        "| library | jobs | "
        + " | ".join(f"{peak}: equal" for peak in PEAKS)
        + " | reserved: within 1 % | furthest below | above |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for library in [*sorted({result["library"] for result in results}), "all"]:
        pairs = [
            (r["peaks"], r["traced"])
            for r in results
            if "peaks" in r and library in (r["library"], "all")
        ]
        if not pairs:
            continue
        real, found = (np.array([pair[column] for pair in pairs], dtype=float) for column in (0, 1))
        error = (found - real)[:, 2] / real[:, 2]
        shares = [
            f"{share:.1%}" for share in (*(real == found).mean(axis=0), np.mean(abs(error) <= 0.01))
        ]
        print(
            f"| {library} | {len(pairs)} | {' | '.join(shares)} | {min(0.0, error.min()):.1%} | {max(0.0, error.max()):.1%} |"
        )
    both = [r for r in results if "reserved_by_rules" in r]
    for name, peaks in (
        ("cuDNN", [r["traced"][2] for r in both]),
        ("rules", [r["reserved_by_rules"] for r in both]),
    ):
        if both:
            errors = abs(np.array(peaks) / [r["peaks"][2] for r in both] - 1)
            print(
                f"Reserved bytes of the {len(both)} jobs with workspaces of convolutions, by {name}: median error "
                f"{np.median(errors):.1%}, 90th percentile {np.quantile(errors, 0.9):.1%}"
            )
    for result in results:
        if "error" in result:
            print(f"{result['trace']}: {result['error']}")


if __name__ == "__main__":
    main()
