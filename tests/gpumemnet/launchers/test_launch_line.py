"""Lines that start a training, as people type them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from gpumemnet.errors import InvalidRequestError
from gpumemnet.launchers.launch_line import Launch, is_launch, parse_launch
from gpumemnet.tracing import trace_script


def _program(*words: str) -> Launch:
    return Launch("gpumemnet.launchers.programs", True, words)


@pytest.mark.parametrize(
    ("line", "launch"),
    [
        ("python train.py --lr 1e-4", Launch("train.py", arguments=("--lr", "1e-4"))),
        ("uv run --with x train.py 1", Launch("train.py", arguments=("1",))),
        ("python3.11 -u -m pkg.train 8", Launch("pkg.train", True, ("8",))),
        ("python -um pkg.train -m", Launch("pkg.train", True, ("-m",))),
        ("srun -p test bash a.sh b.py", _program("bash", "a.sh", "b.py")),
        ("sbatch --time 1 /nowhere/a.sh", _program("bash", "/nowhere/a.sh")),
        ("uv run --with x env", _program("env")),
        (
            "torchrun --no-python bash a.sh",
            replace(_program("bash", "a.sh"), ranks=1, variables={"LOCAL_WORLD_SIZE": "1"}),
        ),
        ("mpirun -np 4 -x A=1 python train.py -n 2", Launch("train.py", False, ("-n", "2"), 4)),
        (
            "torchrun --nproc-per-node 4 train.py --lr 1e-4",
            Launch("train.py", False, ("--lr", "1e-4"), 4, {"LOCAL_WORLD_SIZE": "4"}),
        ),
        (
            "torchrun --standalone --nnodes=1:2 --nproc_per_node=8 -m pkg.train -- --x",
            Launch("pkg.train", True, ("--x",), 16, {"LOCAL_WORLD_SIZE": "8"}),
        ),
        (
            "/opt/bin/python -m torch.distributed.run --rdzv-backend c10d --nproc-per-node 2 a.py",
            Launch("a.py", ranks=2, variables={"LOCAL_WORLD_SIZE": "2"}),
        ),
        (
            "python -m torch.distributed.launch --nproc_per_node=2 /nowhere/a.py 1",
            Launch("/nowhere/a.py", False, ("--local-rank=0", "1"), 2, {"LOCAL_WORLD_SIZE": "2"}),
        ),
        (
            "python -m torch.distributed.launch --use_env a.py",
            Launch("a.py", ranks=1, variables={"LOCAL_WORLD_SIZE": "1"}),
        ),
        (
            "torchrun -- train.py",
            Launch("train.py", ranks=1, variables={"LOCAL_WORLD_SIZE": "1"}),
        ),
        (
            "OMP_NUM_THREADS=1 A= python train.py",
            Launch("train.py", variables={"OMP_NUM_THREADS": "1", "A": ""}),
        ),
        (
            "deepspeed --num_nodes=2 --num_gpus 8 --master_port 1 train.py --deepspeed ds.json",
            Launch("train.py", False, ("--local_rank=0", "--deepspeed", "ds.json"), 16),
        ),
        (
            "CUDA_VISIBLE_DEVICES=1,2 deepspeed train.py",
            Launch("train.py", False, ("--local_rank=0",), 2, {"CUDA_VISIBLE_DEVICES": "1,2"}),
        ),
        (
            "deepspeed --no_local_rank --include worker-0:0,1@worker-1:2 --module pkg.train",
            Launch("pkg.train", True, (), 3),
        ),
    ],
)
def test_lines_are_read_as_their_launchers_read_them(line: str, launch: Launch) -> None:
    words = shlex.split(line)
    assert is_launch(words)
    assert parse_launch(words) == launch


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("deepspeed train.py", "deepspeed without --num_gpus depends on the machine"),
        ("deepspeed -i worker-0 train.py", "name the GPUs, as in localhost:0,1"),
        (
            "accelerate launch --config_file c.yaml train.py",
            "passed configuration file `c.yaml` does not exist",
        ),
        (
            "accelerate launch --use_megatron_lm --num_processes 2 train.py",
            "Megatron brings kernels",
        ),
        ("accelerate launch --multi_gpu train.py", "say with --ranks how many GPUs"),
        ("accelerate config", "only 'accelerate launch' starts a training"),
        ("torchrun --nproc-per-node gpu train.py", "gpu depends on the machine: say with --ranks"),
        ("torchrun --nproc-per-node 0 train.py", "must be a number above 0, not '0'"),
        ("torchrun --nproc-per-node 4", "the line names no script"),
        ("python -c pass", "write it into a file"),
        ("A=1 mpirunner python train.py", "'mpirunner' is no program on this machine"),
        ("A=1 srun", "names no script and no launcher of one"),
        ("A=1", "the line names no program"),
    ],
)
def test_other_lines_are_refused_with_what_to_do(line: str, sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        parse_launch(shlex.split(line))


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("deepspeed train.py", 8),
        ("srun -n 1 torchrun --nnodes 2 --nproc-per-node gpu train.py", 8),
        ("accelerate launch --multi_gpu train.py", 8),
        ("torchrun --nproc-per-node 2 train.py", 2),
        ("accelerate launch --num_processes 2 train.py", 2),
        ("accelerate launch train.py", 8),
    ],
)
def test_lines_that_take_all_gpus_are_told_how_many(line: str, ranks: int) -> None:
    launch = parse_launch(shlex.split(line), 8)
    assert (launch.script, launch.ranks) == ("train.py", ranks)


def test_gpus_that_the_shell_names_are_those_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, of_line, ranks in (("2,3", "2,3", 2), ("", "", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        launch = parse_launch(["deepspeed", "--num_gpus", "1", "train.py"])
        assert launch.variables.get("CUDA_VISIBLE_DEVICES", "") == of_line
        assert ranks is None or parse_launch(["deepspeed", "train.py"]).ranks == ranks


def test_programs_of_python_run_here_and_others_start_processes(tmp_path: Path) -> None:
    program = tmp_path / "tune"
    program.write_text("#!/usr/bin/python3\n")
    program.chmod(0o755)
    assert parse_launch(["A=1", str(program), "run"]) == Launch(
        str(program), arguments=("run",), variables={"A": "1"}
    )
    launch = parse_launch(["bash", "run.sh"])
    assert (launch.is_module, launch.arguments) == (True, ("bash", "run.sh"))


TRAIN = """
import huggingface_hub, torch
try:
    import flash_attn
except ImportError:
    flash_attn = None
assert flash_attn is None
from flash_attn.bert_padding import pad_input
torch.distributed.init_process_group("nccl")
huggingface_hub.create_repo("owner/name")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.rand(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_what_a_shell_starts_is_traced_without_hub_and_flash_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run.sh").write_text(
        "CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc-per-node gpu train.py"
    )
    monkeypatch.chdir(tmp_path)
    launch = parse_launch(["bash", "run.sh"])
    notes = trace_script(launch).notes
    assert {"the first of 4 ranks.", "nothing was pushed to the hub."} <= set(notes)
    assert any(note.startswith("PyTorch's own flash attention stands in") for note in notes)


_FSDP = """
distributed_type: FSDP
num_processes: 8
num_machines: 2
mixed_precision: bf16
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
fsdp_config:
  sharding_strategy: HYBRID_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_use_orig_params: false
  fsdp_color: red
"""


def test_accelerate_reads_its_own_file_and_flags_come_first(
    tmp_path: Path,
) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text(_FSDP)
    line = f"HF_HOME={tmp_path} accelerate launch --fsdp_use_orig_params true --num_processes 16 -m pkg.train --a"
    launch = parse_launch(shlex.split(line))
    assert (launch.script, launch.is_module, launch.arguments) == ("pkg.train", True, ("--a",))
    assert (launch.ranks, launch.variables["LOCAL_WORLD_SIZE"]) == (16, "8")
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_USE_ORIG_PARAMS": "true",
    }
    assert launch.variables.items() >= expected.items()
    assert "its default file on this machine" in launch.notes[0]
    assert launch.notes[1].endswith("accelerate does not read fsdp_config.fsdp_color")


def test_a_factory_is_no_line() -> None:
    assert not is_launch(["train.py:build"])
    assert not is_launch([])
