"""What all commands have in common: their options, help, mistakes, standard input and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpumemnet.cli import main
from gpumemnet.cli.commands import ENTRIES, load
from gpumemnet.job.json_codec import job_to_dict
from tests.interface_counts import all_commands
from tests.jobs import small_job

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "mlp_job.json"
MODEL = f"{Path(__file__).parents[1]}/extract/examples/small.py:sized"
PROGRAM = [sys.executable, "-m", "gpumemnet"]
SNAPSHOT = Path(__file__).with_name("options.txt")


def options() -> str:
    """All commands with their arguments and options, as the snapshot lists them."""
    lines = []
    for words, command in all_commands().items():
        lines.append(f"gpumemnet {' '.join(words)}")
        for each in command.params:
            names = ", ".join((*each.opts, *each.secondary_opts))
            kind = "" if getattr(each, "is_flag", False) else f" {each.metavar or ''}"
            lines.append(f"    {names}{kind}".rstrip() + " (required)" * bool(each.required))
    return "\n".join(lines) + "\n"


def test_no_option_is_renamed_by_accident() -> None:
    assert options() == SNAPSHOT.read_text("utf-8"), f"if meant: python {__file__} > {SNAPSHOT}"


def test_every_command_explains_itself_and_has_a_form_for_programs() -> None:
    for name, entry in ENTRIES.items():
        assert " ".join((load(name).help or "").split()).startswith(entry.summary)
    without_json = []
    for words, command in all_commands().items():
        given = [each for each in command.params if each.param_type_name == "option"]
        assert [each.name for each in given if not each.help] == [], words
        if not any("--json" in each.opts for each in given):
            without_json.append(words)
    assert without_json == [("serve",)]


def test_help_is_printed_and_loads_no_command(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ENTRIES:
        assert main([name, "--help"]) == 0
        assert f"gpumemnet {name}" in capfd.readouterr().out
    code = (
        "import sys\nfrom gpumemnet.cli import main\nassert main(['--help']) == 0\n"
        "assert not {'numpy', 'torch', 'pandas', 'onnxruntime', 'models', 'service', 'dataset_builder'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    "arguments",
    [["predct"], ["predict", "--covrage", "1", "x"], ["extract"], ["train"], ["build", "campain"]],
)
def test_a_wrong_command_line_has_exit_code_2(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "--help" in shown.err


TRACE = ["trace", MODEL, "--batch-size", "2", "--input", "8"]
EXTRACT = ["extract", *TRACE[1:]]
PLAN = ["plan", *TRACE[1:], "--gpu", "RTX-4090"]
GOOD = json.dumps(job_to_dict(small_job()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["predict", JOB, "--coverage", "1.5"], "--coverage: must be between 0.5 and 0.999"),
        (["predict", JOB, "--bin-width", "-5"], "--bin-width: must be at least 1 MiB"),
        (["predict", JOB, "--bin-width", "3"], "--bin-width: gives 65537 bins"),
        (["predict", JOB, "--gpu", "H2000"], "--gpu: no profile of 'H2000': did you mean 'H200'?"),
        (["predict", JOB, "--encoder", "oracle"], "--encoder: must be one of mlp"),
        (["predict", JOB, "--bundle", "/none"], "/none: no such bundle folder"),
        (["predict", JOB, "--workers", "2"], "--out: --engine, --workers and --id-column need"),
        (["predict", "none.json"], "none.json does not exist"),
        (["predict", "job.yaml"], "must end in .json"),
        (["predict", "{"], "no valid JSON: EOF"),
        (["predict", "[1]"], "[0]: a job must be a JSON object, not 1"),
        (["predict", GOOD.replace("adam", "adman")], "optimizer: must be one of"),
        ([*EXTRACT, "--optimizer", "lion"], "--optimizer: must be one of sgd, "),
        ([*EXTRACT, "--input", "3,4"], "--input: must look like 3x224x224"),
        ([*EXTRACT, "--arg", "width"], "--arg: must look like depth=12"),
        ([*EXTRACT, "--arg", "width=1", "--arg", "width=2"], "--arg: 'width' is given twice"),
        ([*EXTRACT, "--set", "colour=red"], "--set: knows attention_kernel, "),
        ([*EXTRACT, "--out", "/none/job.json"], "--out: the folder /none does not exist"),
        ([*EXTRACT, "--deadline", "-1"], "--deadline: must be above 0"),
        ([*TRACE, "--loss", "hinge"], "--loss: must be one of auto, "),
        ([*TRACE, "--set", "zero_grad=never"], "zero_grad: must be one of "),
        ([*TRACE, "--gpu", "/none.json"], "--gpu: /none.json cannot be read"),
        ([*TRACE, "--allocator-conf", "max=1"], "allocator settings: 'max=1' is not of the form"),
        ([*TRACE, "--batches", "1,two"], "--batches: must be batch sizes such as 1,2,4,8"),
        (
            [*TRACE, "--plot", "memory.gif"],
            "--plot: must end in .png or .svg or .pdf, not 'memory.gif'",
        ),
        (
            ["trace"],
            "source: name one factory, such as train.py:build, or write -- python train.py",
        ),
        (["trace", "t.py", "--optimizer", "sgd"], "--optimizer: does not go with a sc"),
        (["trace", "t.py", "--out", "j.json"], "--out: does not go with a script"),
        (["trace", "t.py", "--set", "checkpointing=none"], "--set: checkpointing does"),
        (["trace", "/none/t.py", "--", "-x"], "there is no file /none/t.py"),
        (["trace", "--ranks", "8", "--", "torchrun", "--nproc-per-node", "4", "t.py"], "--ranks: "),
        (["trace", "--", "python", "-m", "absent"], "absent: there is no module absent to run in"),
        ([*PLAN, "--budget", "20"], "--budget: must be an amount of memory such as 20GiB"),
        ([*PLAN, "--budget", "30GiB"], "--budget: must be from 1 MiB to 24,207 MiB"),
        ([*PLAN, "--host-memory", "much"], "--host-memory: must be an amount of memory"),
        ([*PLAN, "--planner", "genetic"], "--planner: must be one of greedy, exact"),
        ([*PLAN, "--set", "checkpointing=every_block"], "the plan decides what is recomputed"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:40],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str | Path],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An argument that begins like JSON stands for a file with that content."""
    monkeypatch.chdir(tmp_path)
    words = list(map(str, arguments))
    for place, word in enumerate(words):
        if word[0] in "{[":
            Path("job.json").write_text(word)
            words[place] = "job.json"
    assert main(words) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert sentence in shown.err
    assert shown.err.count("\n") == 1


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    code = (
        "import sys\nsys.modules['yaml'] = None\nfrom gpumemnet.cli import main\n"
        "sys.exit(main(['build', 'campaign', 'mlp', '--out', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: gpumemnet build needs the package 'yaml': install the extra, in a clone with  pip install -e '.[build]'\n"
    )


def test_a_dash_is_standard_input() -> None:
    job = JOB.read_text()
    lines = f"{json.dumps(json.loads(job))}\n" * 2
    for content, count in ((job, 1), (f"[{job}]", 1), (lines, 2)):
        command = [*PROGRAM, "predict", "-", "--json"]
        done = subprocess.run(
            command, input=content, capture_output=True, text=True, timeout=300, check=True
        )
        assert len(done.stdout.splitlines()) == count


def test_the_version_is_that_of_the_package() -> None:
    shown = subprocess.run([*PROGRAM, "--version"], check=True, capture_output=True, text=True)
    assert re.fullmatch(r"gpumemnet \d+\.\d+\.\d+, compiled modules: (yes|no)\n", shown.stdout)


def test_ctrl_c_ends_the_child_too_and_exits_with_130(tmp_path: Path) -> None:
    mark = tmp_path / "child.pid"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(mark)!r} + '.part', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(mark)!r} + '.part', {str(mark)!r})\nwhile True: time.sleep(1)\n"
    )
    command = [*PROGRAM, "extract", f"{tmp_path}/slow.py:build", "--batch-size", "1"]
    with subprocess.Popen(
        [*command, "--input", "8"], stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        while not mark.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


if __name__ == "__main__":
    sys.stdout.write(options())
