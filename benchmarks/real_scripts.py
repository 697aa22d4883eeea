"""Traces real training scripts as their users would, and prints which of them work.

    python benchmarks/real_scripts.py [--checkouts FOLDER] [--out FILE.jsonl] [--only TEXT ...]
    [--document FILE.md]

``tests/real_scripts/cases.toml`` names the scripts.  Those of others are not part of this
repository: ``--checkouts`` is a folder of clones named ``OWNER+NAME``, work trees or git
directories.  A script whose repository or packages are missing is listed as not
at hand, which is no failure.  Data are made up (``real_scripts_data.py``) in a temporary folder, so
nothing is downloaded.  Each case runs in a child process with a time limit; a second run with the
same ``--out`` runs only what is not in it.

``--null-gpu PYTHON --null-gpu-libraries FOLDER --out FILE`` runs each script on a GPU that counts
memory and computes nothing (``tests/dataset_builder/measure/null_gpu``), for an independent count:
``PYTHON`` has a CUDA build of PyTorch and the same packages.  ``--counts FILE`` is what that wrote.
cuDNN allocates nothing there, so convolutions have no workspaces.

Ends with 1 if fewer than 95 % of the scripts at hand are answered.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from real_scripts_data import MAKERS

ROOT: Final = Path(__file__).parents[1]
CASES: Final = ROOT / "tests" / "real_scripts" / "cases.toml"
OWN: Final = "own"
MARKER: Final = "<!-- written by benchmarks/real_scripts.py -->"
LIBRARIES: Final = Path(__file__).parent / "real_scripts_libraries"
"""Scripts of our own that need packages which the tests do without."""
STARTUP: Final = Path(__file__).parent / "real_scripts_startup"
MIB: Final = 2**20
REQUIRED_SHARE: Final = 0.95
MAX_FILE_BYTES: Final = 4 * MIB


@dataclass(frozen=True, slots=True)
class Case:
    """One script and how it is started.

    Attributes:
        name: unique, for people.
        repository: ``owner/name``, or ``own`` for ``tests/real_scripts`` and
            ``benchmarks/real_scripts_libraries``.
        path: the script in its repository.
        line: the line that starts the training, in place of ``path`` and ``arguments``.
        commit: the commit that it was tried with.
        arguments: the script's own.
        folder: the working directory in the repository; the script's own by default.
        data: made-up data by maker, with the paths at which the script expects them.
        needs: packages that the script imports.
        options: of ``gpumemnet trace``.
        environment: variables to set.
        count: parts in bytes that are known otherwise, and ``by``, how.
        refusal: what the right refusal says, for scripts that use no GPU.
    """

    name: str
    repository: str
    path: str = ""
    line: str = ""
    commit: str = ""
    arguments: tuple[str, ...] = ()
    folder: str | None = None
    data: Mapping[str, str | list[str]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    count: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def version(self) -> str:
        """A short hash of everything that the answer depends on, but for the code."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def read_cases(path: Path = CASES) -> list[Case]:
    """Return the cases of the table; each repository states its commit once.

    Raises:
        ValueError: when two cases have one name.
    """
    document = tomllib.loads(path.read_text())
    commits = document["commits"]
    cases = []
    for fields in document["case"]:
        lists = {
            key: tuple(fields[key]) for key in ("arguments", "needs", "options") if key in fields
        }
        cases.append(Case(**{**fields, **lists}, commit=commits.get(fields["repository"], "")))
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{path}: two cases have one name: {sorted({name for name in names if names.count(name) > 1})}"
        )
    return cases


def main() -> int:
    """Run the cases; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--checkouts", type=Path, help="folder of clones, OWNER+NAME")
    parser.add_argument(
        "--out", type=Path, help="file that keeps the results, one JSON object a line"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="cases whose name contains one of these"
    )
    parser.add_argument(
        "--again", action="store_true", help="run the selected cases again, although --out has them"
    )
    parser.add_argument(
        "--seconds", type=float, default=300, help="time limit of a case (default: 300)"
    )
    parser.add_argument("--gpu", default="H200", help="the simulated GPU (default: H200)")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter with gpumemnet and the scripts' packages",
    )
    parser.add_argument(
        "--null-gpu",
        metavar="PYTHON",
        help="interpreter with a CUDA build of PyTorch, for the independent count",
    )
    parser.add_argument(
        "--null-gpu-libraries",
        type=Path,
        metavar="FOLDER",
        help="where build.py of the null GPU wrote them",
    )
    parser.add_argument(
        "--counts", type=Path, metavar="FILE", help="results of --null-gpu to compare with"
    )
    parser.add_argument("--document", type=Path, help="Markdown file whose table is written anew")
    arguments = parser.parse_args()
    cases = [
        case
        for case in read_cases(arguments.cases)
        if not arguments.only or any(text in case.name for text in arguments.only)
    ]
    runpy.run_path(str(STARTUP / "sitecustomize.py"))  # makers of data may import torchvision, too
    kept, counts = _kept(arguments.out), _kept(arguments.counts)
    rows = []
    for case in cases:
        row = kept.get(case.version)
        if row is None or arguments.again or row["outcome"] == "not at hand":
            row = run(case, arguments)
            _keep(arguments.out, row)
            print(
                f"{case.name}: {row['outcome']} ({row['seconds']:.0f} s) {row.get('sentence', '')[:300]}",
            )
        rows.append(
            row | {"count": independent_count(row, case.count, counts.get(case.version, {}))}
        )
    print(summary(rows))
    if arguments.document:
        write_document(arguments.document, rows)
    tried = [row for row in rows if row["outcome"] != "not at hand"]
    return int(sum(row["outcome"] == "works" for row in tried) < REQUIRED_SHARE * len(tried))


def run(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one case; return its row."""
    row: dict[str, Any] = {
        "name": case.name,
        "version": case.version,
        "outcome": "not at hand",
        "seconds": 0.0,
    }
    missing = missing_packages(arguments.python, case.needs)
    with tempfile.TemporaryDirectory(prefix="real_scripts_") as temporary:
        tree = Path(temporary) / "code"
        if missing:
            return row | {"sentence": f"packages are missing: {', '.join(missing)}"}
        if not check_out(case, arguments.checkouts, tree):
            return row | {"sentence": f"no checkout of {case.repository}"}
        script = tree / case.path
        if not script.exists():
            return row | {"sentence": f"{case.repository} has no file {case.path}"}
        folder = tree / (case.folder or (script.parent if case.path else "."))
        for maker, paths in case.data.items():
            for path in [paths] if isinstance(paths, str) else paths:
                MAKERS[maker](folder / path)
        command = [
            *(
                arguments.python,
                "-m",
                "gpumemnet",
                "trace",
                "--gpu",
                arguments.gpu,
                "--json",
            ),
            *("--deadline", str(arguments.seconds), *case.options),
            *(
                ("--", *shlex.split(case.line))
                if case.line
                else (str(script), "--", *case.arguments)
            ),
        ]
        environment = {"PYTHONPATH": str(STARTUP), **case.environment}
        if "PYTHONPATH" in case.environment:
            environment["PYTHONPATH"] = f"{STARTUP}:{folder / case.environment['PYTHONPATH']}"
        if arguments.null_gpu:
            return row | null_gpu_peaks(arguments, case, script, folder, environment)
        status, seconds, output, errors = _timed(
            command, folder, environment, arguments.seconds + 60
        )
    row |= {"seconds": round(seconds, 1), "sentence": ""}
    if status is None:
        return row | {
            "outcome": "too slow",
            "sentence": f"no answer within {arguments.seconds:.0f} s",
        }
    if status != 0 or not output.strip().startswith("{"):
        sentence = _one_line(errors).replace(str(tree), "…")
        if case.refusal and case.refusal in sentence:
            return row | {"outcome": "works", "sentence": sentence}
        return row | {
            "outcome": "too slow" if "was not done after" in sentence else "refused",
            "sentence": sentence,
        }
    answer = json.loads(output)
    fields = (
        "expected_bytes",
        "safe_bytes",
        "allocated_bytes",
        "reserved_bytes",
        "context_bytes",
        "parts",
        "batch_size",
        "notes",
    )
    row |= {"outcome": "works", **{key: answer[key] for key in fields}}
    return row | {"notes": [note.replace(str(tree), "…") for note in row["notes"]]}


def null_gpu_peaks(
    arguments: argparse.Namespace,
    case: Case,
    script: Path,
    folder: Path,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Run a case on the null GPU; return the peaks in bytes as ``null_gpu``, or the last line of
    its error."""
    sys.path.insert(0, str(ROOT))
    from tests.dataset_builder.measure.null_gpu.build import environment as null_gpu

    libraries = arguments.null_gpu_libraries
    out = folder / "null_gpu_peaks.json"
    command = [
        arguments.null_gpu,
        str(Path(__file__).with_name("real_scripts_null_gpu.py")),
        str(out),
        str(script),
        *case.arguments,
    ]
    status, seconds, _, errors = _timed(
        command, folder, {**null_gpu(libraries), **environment}, arguments.seconds
    )
    if out.exists():
        return {
            "outcome": "works",
            "seconds": round(seconds, 1),
            "null_gpu": json.loads(out.read_text()),
        }
    lines = errors.strip().splitlines()
    sentence = lines[-1][:500] if lines else f"ended with {status}"
    return {
        "outcome": "too slow" if status is None else "refused",
        "seconds": round(seconds, 1),
        "sentence": sentence,
    }


def independent_count(
    row: Mapping[str, Any], count: Mapping[str, Any], on_null_gpu: Mapping[str, Any]
) -> str:
    """Compare an answer with what is known without it: parts by hand, and the reserved bytes of the
    null GPU."""
    if "parts" not in row:
        return ""
    said = []
    for part, expected in count.items():
        if part != "by":
            difference = row["parts"][part] - expected
            said.append(f"{part} {'equal' if not difference else f'{difference / MIB:+,.2f} MiB'}")
    if said:
        said = [f"{', '.join(said)} ({count['by']})"]
    if "null_gpu" in on_null_gpu:
        reserved = on_null_gpu["null_gpu"]["reserved"]
        said.append(
            f"null GPU {reserved / MIB:,.0f} MiB, {row['reserved_bytes'] / reserved - 1:+.1%}"
        )
    return "; ".join(said)


def missing_packages(python: str, needs: Iterable[str]) -> list[str]:
    """Return the packages among ``needs`` that the interpreter cannot import."""
    code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
    found = (
        subprocess.run([python, "-c", code, *needs], capture_output=True, text=True, check=True)
        if needs
        else None
    )
    return found.stdout.split() if found else []


def check_out(case: Case, checkouts: Path | None, tree: Path) -> bool:
    """Write the case's repository to ``tree``; return whether it is at hand."""
    if case.repository == OWN:
        shutil.copytree(LIBRARIES, tree)
        for script in CASES.parent.glob("*.py"):
            shutil.copy(script, tree)
        return True
    source = checkouts / case.repository.replace("/", "+") if checkouts else None
    if source is None or not source.is_dir():
        return False
    for folder in (source / ".git", source / "repo" / ".git", source / "repo", source):
        if (folder / "objects").is_dir():
            return _extract(folder, case.commit, tree)
    shutil.copytree(source, tree, symlinks=True)
    return True


def _extract(git: Path, commit: str, tree: Path) -> bool:
    """Write the files of a commit, but for large ones and those that a partial clone lacks."""
    variables = {**os.environ, "GIT_NO_LAZY_FETCH": "1"}

    def ask(*words: str, given: bytes = b"") -> bytes:
        return subprocess.run(
            ["git", f"--git-dir={git}", *words],
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
            check=False,
        ).stdout

    listed = ask("ls-tree", "-r", "-z", commit) or ask("ls-tree", "-r", "-z", "HEAD")
    entries = []
    for line in listed.decode().split("\0"):
        head, _, path = line.partition("\t")
        if head.split()[1:2] == ["blob"] and head[:6] != "120000":
            entries.append((head.split()[2], path))
    sizes = (
        ask("cat-file", "--batch-check", given="".join(f"{blob}\n" for blob, _ in entries).encode())
        .decode()
        .splitlines()
    )
    wanted = [
        (blob, path)
        for (blob, path), size in zip(entries, sizes, strict=True)
        if not size.endswith("missing") and int(size.split()[2]) <= MAX_FILE_BYTES
    ]
    contents = ask("cat-file", "--batch", given="".join(f"{blob}\n" for blob, _ in wanted).encode())
    at = 0
    for _, path in wanted:
        end = contents.index(b"\n", at)
        size = int(contents[at:end].split()[2])
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(contents[end + 1 : end + 1 + size])
        at = end + size + 2
    return bool(wanted)


def _timed(
    command: list[str], folder: Path, environment: Mapping[str, str], limit_seconds: float
) -> tuple[int | None, float, str, str]:
    """Run a command; return its status (``None`` if it was ended), the CPU seconds of it and of the
    processes that it waited for, its output and errors."""
    variables = {
        **os.environ,
        "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "1000",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        **environment,
    }
    before = os.times()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # data loaders and other children of the script
            process.wait()
        output.seek(0)
        errors.seek(0)
        after = os.times()
        seconds = sum(after[2:4]) - sum(before[2:4])
        return status, seconds, output.read(), errors.read()


def _one_line(errors: str) -> str:
    return re.sub(r"\s+", " ", errors).strip()[-2000:]


def _kept(out: Path | None) -> dict[str, dict[str, Any]]:
    if out is None or not out.exists():
        return {}
    return {row["version"]: row for row in map(json.loads, out.read_text().splitlines())}


def _keep(out: Path | None, row: Mapping[str, Any]) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def summary(rows: list[dict[str, Any]]) -> str:
    """Return one sentence with the number of scripts of each outcome."""
    tried = [row for row in rows if row["outcome"] != "not at hand"]
    works = sum(row["outcome"] == "works" for row in tried)
    slow = sum(row["outcome"] == "too slow" for row in tried)
    share = f" ({works / len(tried):.0%})" if tried else ""
    return (
        f"{works} of {len(tried)} scripts are answered{share}, {len(tried) - works - slow} refused, {slow} too slow; "
        f"{len(rows) - len(tried)} not at hand"
    )


def write_document(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write summary and table below the marker of a Markdown file."""
    head, marker, _ = path.read_text().partition(MARKER)
    if not marker:
        raise SystemExit(f"{path}: the line {MARKER} is missing; the table goes below it")
    lines = [
        "| script | outcome | CPU seconds | MiB | independent count, or why not |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        mib = f"{row['expected_bytes'] / MIB:,.0f}" if "expected_bytes" in row else ""
        why = row["count"] or row["sentence"][:160].replace("|", " ").replace("`", "'").replace(
            "<", "&lt;"
        )
        lines.append(f"| {row['name']} | {row['outcome']} | {row['seconds']:.0f} | {mib} | {why} |")
    path.write_text(f"{head}{marker}\n\n{summary(rows)}.\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
