"""Unmodified training scripts: each runs in a process of its own, as it does for a user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import peak_of
from gpumemnet.tracing.training_loop import record
from gpumemnet.units import MIB
from tests.gpumemnet.tracing import script_child
from tests.nightly import nightly

SCRIPTS = Path(__file__).parent / "examples" / "scripts"


def traced(script: Path | str, *arguments: str, ranks: int | None = None) -> Any:
    return script_child.traced(
        SCRIPTS / f"{script}.py" if isinstance(script, str) else script, arguments, ranks
    )


def test_a_plain_script_takes_what_its_model_takes(platform: Platform) -> None:
    answer = traced("plain", "--batch-size", "128", "--width", "768")
    model = nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Dropout(0.1), nn.Linear(768, 10))
    options = TraceOptions(optimizer="adamw", loss="cross_entropy", keeps_names=True)
    timeline = record(
        model, inputs_from_example(torch.zeros(128, 256), None), options, platform
    ).timeline
    assert answer["requested_bytes"] == peak_of(timeline, timeline.sizes)[0]
    assert answer["batch_size"] == 128
    assert answer["model"] == "plain.py (Sequential)"
    assert any("plain.py line 32" in note and "taken to be 0" in note for note in answer["notes"])


def test_autocast_scaler_accumulation_workers_and_clipping() -> None:
    answer = traced("mixed")
    assert answer["model"] == "mixed.py (Net)"
    weights = 4 * (3 * 64 * 9 + 64 + 2 * 64 + 64 * 16 * 16 * 10 + 10)
    assert answer["parts"]["parameter"] == weights
    assert 0 <= answer["parts"]["gradient"] <= weights
    assert answer["parts"]["workspace"] > 0


def test_what_a_script_keeps_is_said() -> None:
    grows = [note for note in traced("leak")["notes"] if "grows by" in note]
    assert grows == [
        "the memory on the GPU grows by 4.0 MiB with every step: the script keeps tensors of earlier steps."
    ]
    assert not any("grows by" in note for note in traced("leak", "--mended")["notes"])


def test_checkpointing_compile_fused_and_saving() -> None:
    answer = traced("checkpointed")
    weights = 2 * (5000 * 256 + 6 * (2 * 256 + 256 * 768 + 768 + 256 * 256 + 256))
    assert answer["parts"]["parameter"] == weights  # the tied head is there once
    assert answer["parts"]["optimizer_state"] >= 2 * weights
    notes = " ".join(answer["notes"])
    assert "torch.compile: Model is not captured as one graph" in notes
    assert "torch.save wrote nothing to /nonexistent/model.pt" in notes


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("cpu_only", "the model never left the CPU: 100 optimizer steps ran there"),
        (
            "shapes",
            "shapes.py line 10: aten._to_sparse_bsr does not say what its output is like",
        ),
    ],
)
def test_what_cannot_be_traced_is_named(script: str, sentence: str) -> None:
    assert sentence in traced(script)


_STEP = (
    "import sys, torch\ndef main():\n  model = torch.nn.Linear(8, 8).cuda()\n"
    "  optimizer = torch.optim.SGD(model.parameters())\n  model(torch.ones(4, 8).cuda()).sum().backward()\n  optimizer.step()\n"
    "main()"
)
_CHAIN = "line 4: KeyError: 'depth'; this led to ValueError: no such model"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("raise RuntimeError('no data here')", "line 1: RuntimeError: no data here"),
        ("raise ValueError('gpu: [0, 1] But your machine only has: [0]')", "--ranks 2"),
        ("import sys\nsys.exit(3)", "sys.exit(3)"),
        (
            "import torch\nweight = torch.ones(4, requires_grad=True)\nwhile True: weight.sum().backward()",
            "ended before anything was on the GPU",
        ),
        (
            "import sys\ntry:\n  {}['task']\nexcept KeyError:\n  sys.exit(1)",
            "line 3: KeyError: 'task'",
        ),
        ("try:\n  {}['task']\nexcept KeyError:\n  raise SystemExit(0)", "sys.exit(0)"),
        ("import torch._six", "a part of another version of 'torch'"),
        (  # as in a loader that shuffles
            "import torch\ntorch.set_default_tensor_type('torch.cuda.FloatTensor')\n"
            "torch.randperm(4, generator=torch.Generator())",
            "Expected a 'cuda' device type for generator",
        ),
        ("this is no python", "is no valid Python"),
        (
            "import torch\ntorch.distributed.init_process_group('nccl')",
            "--ranks: the script starts a process group",
        ),
        ("", "the script ended before anything was on the GPU and before any optimizer stepped"),
        (f"import sys\n{_STEP.replace('optimizer.step()', 'sys.exit(4)')}", "it ended at"),
        (f"{_STEP.replace('optimizer.step()', '')}", "no optimizer stepped on what is on the GPU"),
        (
            "try:\n  {}['depth']\nexcept KeyError as e:\n  raise ValueError('no such model') from e",
            _CHAIN,
        ),
    ],
)
def test_scripts_that_do_not_train(text: str, sentence: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert sentence in traced(script)


TOY = """
import torch
from torch import nn
small = nn.Linear(8, 1)
shown, optimizer = (torch.optim.SGD(small.parameters(), lr=0.1) for _ in range(2))
rates = [[shown.step() or 0 for _ in range(1000)] for _ in range(2)]  # nothing is trained
assert torch.tensor(rates).shape == (2, 1000)
for _ in range(10**6):
    small(torch.rand(4, 8)).sum().backward()
    optimizer.step()
"""


def test_what_is_trained_on_the_host_before_the_model(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TOY + BEGIN + TRAIN)
    answer = traced(script)
    assert answer["parts"]["parameter"] == 4 * (64 + 8)
    assert any("loops were left" in note and "line 8" in note for note in answer["notes"])


def test_an_assertion_about_values_that_were_read_holds(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        BEGIN + "nodes = [object() for _ in range(9)]\n"
        "first, second = model(torch.ones(2, 8).cuda()).argmax(1).tolist()\n"
        "assert nodes[first] is not nodes[second]\n" + TRAIN
    )
    assert traced(script)["parts"]["parameter"] == 4 * (64 + 8)


def test_parameters_are_halved_that_are_trained_by_hand(tmp_path: Path) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(64, 64).cuda().half()\nfor _ in range(4):\n"
        "    model(torch.ones(4, 64).cuda().half()).sum().backward()\n"
        "    for each in model.parameters(): each.data -= each.grad; each.grad = None\n"
    )
    assert traced(script)["parts"]["parameter"] == 2 * (64 * 64 + 64)


def test_a_model_of_any_size_can_be_built(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(40)]).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.rand(2, 16384, device='cuda')).mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    assert traced(script)["parts"]["parameter"] == 40 * 4 * (16384**2 + 16384)


def test_the_gpu_is_answered_for(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 1\n"
        "assert torch.cuda.get_device_name(0) == 'NVIDIA A100-SXM4-40GB'\n"
        "assert torch.cuda.get_device_capability() == (8, 0)\n"
        "assert torch.version.cuda.split('.') and torch.backends.cudnn.version() and torch.backends.cudnn.is_available()\n"
        "with torch.cuda.profiler.profile(): torch.cuda.set_per_process_memory_fraction(0.5)\n"
        "assert (torch._C._cuda_getDeviceCount(), torch.cuda.get_sync_debug_mode(), torch._C._nccl_version_suffix()) == (1, 0, b'')\n"
        "assert torch._C._cuda_clearCublasWorkspaces() is None and not hasattr(torch._C, '_cuda_setRNGState')\n"
        "assert torch.cuda.memory_stats()['segment.all.peak'] == 0 and torch.cuda.default_generators[0]\n"
        "layer = nn.Linear(1024, 1024).to('cuda')\n"
        "assert next(layer.parameters()).is_cuda and next(layer.parameters()).device == torch.device('cuda', 0)\n"
        "assert torch.cuda.memory_allocated() >= 4 * 1024 * 1024\n"
        "free, total = torch.cuda.mem_get_info()\n"
        "assert total == torch.cuda.get_device_properties(0).total_memory == 40448 * 2**20  # 39.50 GiB, as the driver says\n"
        "assert 0 < free < total - torch.cuda.memory_allocated() - 300 * 2**20  # the CUDA context is taken\n"
        "own = type('Own', (nn.Parameter,), {})(torch.ones(8))\n"
        "own.data = own.data.to(0)\n"
        "assert own.is_cuda and type(own).__name__ == 'Own'\n"
        "x = torch.ones(8, 1024)\n"
        "assert x.sum().item() == 8192 and not x.is_cuda\n"
        "optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    y = layer(x.to('cuda', non_blocking=True))\n"
        "    assert y.device.type == 'cuda' and y.detach().cpu().shape == (8, 1024) and 'cuda:0' in repr(y)\n"
        "    y.sum().backward()\n"
        "    optimizer.step()\n"
        "    torch.cuda.synchronize(); torch.cuda.empty_cache()\n"
    )
    assert isinstance(traced(script), dict)


def test_replicas_that_torchrun_starts() -> None:
    answer = traced("ddp_torchrun", ranks=8)
    weights = 4 * (512 * 2048 + 2048 + 2 * 2048 + 2048 * 512 + 512)
    parts = answer["parts"]
    assert (parts["gradient"], parts["optimizer_state"]) == (weights, 2 * weights)
    assert parts["communication"] >= weights  # the buckets
    assert parts["communicator"] == 688 * MIB
    assert (answer["model"], answer["batch_size"]) == ("ddp_torchrun.py (Sequential)", 64)
    assert "the first of 8 ranks." in answer["notes"]


def test_replicas_that_a_script_starts_itself() -> None:
    assert traced("ddp_spawn", ranks=2)["parts"]["communicator"] == 544 * MIB
    assert traced("ddp_spawn")["parts"]["communicator"] == 0  # it finds one GPU


@pytest.mark.parametrize("arguments", [(), *nightly([(("meta",),), (("whole",),)])])
def test_shards_however_they_are_made(arguments: tuple[str, ...]) -> None:
    parts = traced("fully_sharded", *arguments, ranks=8)["parts"]
    shards = 4 * (
        6 * (1024 // 8 * 1024 + 1024 // 8) + 2 * 1024 + 2
    )  # ten rows among eight: two for the first
    assert (parts["parameter"], parts["optimizer_state"]) == (shards, 2 * shards)


SAVING = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    optimizer.zero_grad(); model(torch.rand(8, 4096).cuda()).mean().backward(); optimizer.step()
options = StateDictOptions(full_state_dict=True)
torch.save(get_model_state_dict(model, options=options), "state.pt")
"""


def test_a_state_that_is_gathered_to_be_saved_is_a_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("save.py").write_text(SAVING)
    answer = traced(tmp_path / "save.py", ranks=2)
    phases = {phase["name"]: phase["requested_bytes"] / MIB for phase in answer["phases"]}
    shards, gradients, whole, layer = 128, 128, 256, 64
    assert phases["saving"] == pytest.approx(shards + gradients + whole + layer, abs=18)
    assert answer["peak"]["phase"] == "saving"


BEGIN = "import torch, torch.distributed as dist\nfrom torch import nn\nmodel = nn.Linear(8, 8).cuda()\n"
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.rand(4, 8, device="cuda")).mean().backward()
    optimizer.step()
"""


def test_a_second_default_process_group_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + 2 * "dist.init_process_group('nccl')\n" + TRAIN)
    assert "a second default process group" in traced(script, ranks=2)


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        ("", "the script has started no process group; this is its memory on one GPU."),
        (
            "dist.init_process_group('nccl', world_size=4, rank=0); assert dist.get_backend() == 'nccl'",
            "the first of 4 ranks.",
        ),
        (
            "torch.UntypedStorage(2**28).resize_(2**29); dist.init_process_group('nccl')",
            "the first of 2 ranks.",
        ),
    ],
)
def test_of_how_many_gpus_a_script_is_one(lines: str, note: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + lines + TRAIN)
    answer = traced(script, ranks=2)
    assert note in answer["notes"]
    assert answer["requested_bytes"] < 64 * MIB  # what lies on the host is none of the GPU's


def test_streams_are_what_scripts_take_them_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        BEGIN
        + "side = torch.cuda.Stream(priority=-1)\n"
        + "assert isinstance(side, torch.cuda.Stream) and side.cuda_stream and side.query() and side.device.type == 'cuda'\n"
        + "def batch(): return torch.empty(30 * 2**18, device='cuda').sum()\n"
        + "with side: batch()\n"
        + "with torch.cuda.stream(side): batch()\n"
        + "torch.cuda.set_stream(side); batch(); torch.cuda.set_stream(torch.cuda.default_stream()); batch()"
        + TRAIN
    )
    answer = traced(script)
    assert 60 * MIB <= answer["reserved_bytes"] < 90 * MIB  # one block on either stream


def test_a_batch_that_is_fetched_ahead_on_a_stream_of_its_own() -> None:
    answer = traced("prefetch")
    assert answer["parts"]["input"] == 2 * 4 * 4096 * 1024


def test_what_else_ranks_exchange() -> None:
    answer = traced("ddp_exchanges", ranks=4)
    weights = 4 * (64 * 3 * 9 + 64 + 2 * 64 + 64 * 900 * 10 + 10)
    assert answer["parts"]["communication"] >= weights
    assert (answer["model"], answer["batch_size"]) == ("ddp_exchanges.py (Sequential)", 8)


@pytest.mark.parametrize("sharded", [*nightly([False]), True])
def test_columns_and_rows_of_layers(sharded: bool) -> None:
    answer = traced("tensor_parallel", *(["sharded"] if sharded else []), ranks=8)
    parts = answer["parts"]
    wide = 2 * 512 * 2048 // 4 + 2048 // 4  # of both layers a quarter, and of the first one's bias
    rest, last = 3 * 512, 10 * 512 + 10
    weights = (4 * (wide + rest) + last) // (2 if sharded else 1)
    assert parts["parameter"] == 4 * weights
    assert (
        parts["communicator"] == (688 + (544 if sharded else 0)) * MIB
    )  # four share layers, two share those shares
    assert answer["ranks"] == 8
    assert parts["optimizer_state"] == pytest.approx(
        2 * parts["parameter"], abs=1024
    )  # and a step for each parameter
