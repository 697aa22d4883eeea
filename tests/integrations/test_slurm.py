"""The Slurm plug-ins under real Luas, against a real service and against services that fail; Slurm
itself is a stand-in."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gpumemnet.units import ceil_mib
from service.api.examples import EXAMPLE_JOBS
from tests.conftest import RunningService, StartService

ROOT = Path(__file__).parents[2]
FILTER = ROOT / "integrations/slurm/cli_filter.lua"
SUBMIT = ROOT / "integrations/slurm/job_submit.lua"
HOST = Path(__file__).with_name("slurm_host.lua")
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
ID = "0192f3a4-1234-7abc-8def-0123456789ab"
IN_PYTHON = """
import sys
from lupa.{module} import LuaRuntime
lua = LuaRuntime()
lua.globals().arg = lua.table_from(sys.argv[2:])
lua.execute(open(sys.argv[1]).read())
"""

needs_curl = pytest.mark.skipif(
    shutil.which("curl") is None, reason="curl is not installed, and cli_filter.lua asks with it"
)


@dataclass(frozen=True)
class Outcome:
    returned: str
    options: dict[str, str]
    said: str


Texts = dict[str, str]


def run_lua(
    engine: str, script: Path, function: str, environment: Texts, options: Texts, offset: int = 0
) -> Outcome:
    arguments = [
        str(HOST),
        str(script),
        function,
        str(offset),
        *(f"{name}={value}" for name, value in options.items()),
    ]
    command = (
        [str(shutil.which(engine))]
        if engine == "lua5.4"
        else [sys.executable, "-c", IN_PYTHON.format(module=engine)]
    )
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GPUMEMNET_", "SLURM_"))
    }
    done = subprocess.run(
        [*command, *arguments], env=clean | environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.partition("=")[::2] for line in done.stdout.splitlines()]
    return Outcome(
        returned=dict(lines)["returned"],
        options={
            name.removeprefix("option:"): value
            for name, value in lines
            if name.startswith("option:")
        },
        said=" ".join(text for name, text in lines if name in ("info", "user", "error")),
    )


@pytest.fixture(scope="module", params=["lua5.4", "luajit21"])
def engine(request: pytest.FixtureRequest) -> str:
    """Slurm links the Lua that the site has: a new one, and one that speaks 5.1 (the others of lupa
    are built without popen)."""
    if request.param == "lua5.4" and shutil.which("lua5.4") is None:
        pytest.skip("lua5.4 is not installed")
    return str(request.param)


Submit = Callable[..., Outcome]


@pytest.fixture
def submit(engine: str, service: RunningService, tmp_path: Path) -> Submit:
    """Submits a job with options as sbatch would, on a host whose environment asks the test's
    service."""

    def call(
        url: str | None = None,
        offset: int = 0,
        environment: dict[str, str] | None = None,
        **options: str,
    ) -> Outcome:
        settings = {"GPUMEMNET_URL": url or service.url, "TMPDIR": str(tmp_path)}
        named = {"type": "sbatch"} | {
            name.replace("_", "-"): value for name, value in options.items()
        }
        return run_lua(
            engine, FILTER, "slurm_cli_pre_submit", settings | (environment or {}), named, offset
        )

    return call


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(EXAMPLE_JOBS["mlp"]))
    return path


@pytest.fixture(scope="module")
def limit_mib(service: RunningService) -> int:
    answer = httpx.post(
        f"{service.url}/v1/predict", json={"job": EXAMPLE_JOBS["mlp"]}, timeout=300
    ).json()
    return ceil_mib(answer["safe_bytes"])


@needs_curl
def test_a_job_named_in_the_comment_gets_shards_and_its_prediction_id(
    submit: Submit, job_file: Path, limit_mib: int
) -> None:
    outcome = submit(comment=f"night run gpumemnet:{job_file} of the group")
    assert outcome.returned == "0"
    assert outcome.options["gres"] == f"shard:{-(-limit_mib // 1024)}"
    assert re.fullmatch(f"night run gpumemnet:{UUID} of the group", outcome.options["comment"])
    assert f"{limit_mib} MiB" in outcome.said


@needs_curl
def test_a_job_named_in_a_variable_is_found_and_its_comment_kept(
    submit: Submit, job_file: Path, limit_mib: int
) -> None:
    environment = {"GPUMEMNET_JOB": str(job_file), "GPUMEMNET_MIB_PER_SHARD": "100"}
    outcome = submit(environment=environment, comment="mine")
    assert outcome.options["gres"] == f"shard:{-(-limit_mib // 100)}"
    assert re.fullmatch(f"mine gpumemnet:{UUID}", outcome.options["comment"])
    assert re.fullmatch(f"gpumemnet:{UUID}", submit(environment=environment).options["comment"])


@needs_curl
def test_a_model_by_its_name_gets_shards_and_its_comment_stays(
    submit: Submit, service: RunningService
) -> None:
    options = {"method": "lora", "lora_target": "q_proj,v_proj", "sequence_length": 1024}
    question = {"model": "Qwen/Qwen3-0.6B", **options, "checkpointing": False, "gpu": "RTX-4090"}
    answer = httpx.post(f"{service.url}/v1/fit", json=question, timeout=300).json()
    limit_mib = ceil_mib(answer["safe_bytes"])
    text = ",".join(
        f"{name}={str(value).replace('False', 'false')}" for name, value in question.items()
    )
    for outcome in (
        submit(comment=f"mine gpumemnet:{text}"),
        submit(environment={"GPUMEMNET_JOB": text, "GPUMEMNET_GPU": "T4"}),
    ):
        assert outcome.options["gres"] == f"shard:{-(-limit_mib // 1024)}"
        assert outcome.options.get("comment", "") in (f"mine gpumemnet:{text}", "")
        assert f"{limit_mib} MiB" in outcome.said
    several = submit(comment="gpumemnet:model=Qwen/Qwen3-8B,gpu=8xH100")
    assert "gres" not in several.options
    assert "one of 8 replicas" in several.said
    wrong = submit(comment="gpumemnet:model=Qwen/Qwen3-8B,metod=lora")
    assert "the service refused (422): metod" in wrong.said


@needs_curl
def test_one_of_several_replicas_gets_no_shards_of_a_single_gpu(
    submit: Submit, tmp_path: Path
) -> None:
    path = tmp_path / "replica.json"
    path.write_text(json.dumps({**EXAMPLE_JOBS["mlp"], "ranks": 8}, indent=2))
    outcome = submit(comment=f"gpumemnet:{path}")
    assert "gres" not in outcome.options
    assert re.fullmatch(f"gpumemnet:{UUID}", outcome.options["comment"])
    assert "one of 8 replicas: ask for as many GPUs" in outcome.said


@needs_curl
@pytest.mark.parametrize(
    "asked",
    [
        {"gres": "gres/gpu:1"},
        {"gres": "gres:shard:2"},
        {"gpus": "1"},
        {"gpus_per_node": "a100:2"},
        {"tres_per_task": "gres/gpu=1"},
    ],
)
def test_what_the_user_asked_for_stays(submit: Submit, job_file: Path, asked: Texts) -> None:
    outcome = submit(comment=f"gpumemnet:{job_file}", **asked)
    changed = {
        name: value for name, value in outcome.options.items() if name not in ("comment", "type")
    }
    assert changed == {name.replace("_", "-"): value for name, value in asked.items()}
    assert re.fullmatch(f"gpumemnet:{UUID}", outcome.options["comment"])


@needs_curl
def test_outside_the_support_there_are_no_shards_and_the_reason_is_said(
    submit: Submit, tmp_path: Path
) -> None:
    path = tmp_path / "huge.json"
    path.write_text(json.dumps({**EXAMPLE_JOBS["mlp"], "gradient_accumulation": 64}))
    outcome = submit(comment=f"gpumemnet:{path}")
    assert outcome.returned == "0"
    assert "gres" not in outcome.options
    assert "no safe amount" in outcome.said
    assert re.fullmatch(
        f"gpumemnet:{UUID}", outcome.options["comment"]
    )  # so that its observation can be joined


@needs_curl
def test_a_job_larger_than_a_gpu_gets_no_shards(submit: Submit, job_file: Path) -> None:
    outcome = submit(
        environment={"GPUMEMNET_SHARDS_PER_GPU": "1", "GPUMEMNET_MIB_PER_SHARD": "512"},
        comment=f"gpumemnet:{job_file}",
    )
    assert "gres" not in outcome.options
    assert "whole GPU" in outcome.said


def test_jobs_without_a_description_pass_unasked(submit: Submit) -> None:
    for options in ({}, {"comment": "gpumemnet"}, {"comment": f"gpumemnet:{ID}"}):
        outcome = submit(url="http://127.0.0.1:1", **options)
        assert (outcome.returned, outcome.said) == ("0", "")
        assert outcome.options == {"type": "sbatch", **options}


def test_steps_inside_a_job_and_later_components_do_not_ask_for_the_jobs_variable(
    submit: Submit, job_file: Path
) -> None:
    environment = {"GPUMEMNET_JOB": str(job_file)}
    step = submit(environment=environment | {"SLURM_JOB_ID": "7"}, type="srun")
    assert step.options == {"type": "srun"}
    assert submit(environment=environment, offset=1).options == {"type": "sbatch"}


@needs_curl
def test_a_path_is_never_run(submit: Submit, tmp_path: Path) -> None:
    for name in ("$(touch hit)", "'; touch hit; '", "`touch hit`", '"$(touch${IFS}hit)"', "%s%n"):
        path = tmp_path / name.replace(" ", "\t").replace("/", "_")
        path.write_text(json.dumps(EXAMPLE_JOBS["mlp"]))
        outcome = submit(environment={"GPUMEMNET_JOB": str(path)})
        assert re.fullmatch(f"gpumemnet:{UUID}", outcome.options["comment"])
    hostile_url = "http://127.0.0.1:1/'; touch hit; '\"$(touch hit)"
    assert submit(url=hostile_url, environment={"GPUMEMNET_JOB": str(path)}).returned == "0"
    assert not list(tmp_path.glob("hit"))
    assert not Path("hit").exists()


# Failing open
# ------------------------------------------------------------------------------------------------------------


def assert_unchanged(outcome: Outcome, comment: str) -> None:
    assert outcome.returned == "0"
    assert outcome.options == {"type": "sbatch", "comment": comment}
    assert "the job is submitted as it is: " in outcome.said


@needs_curl
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hang", ""),
        ("401", "(401): no such key"),
        ("429", "too many"),
        ("html", "URL"),
        ("other", "URL"),
        ("deep", "URL"),
        (None, "did not answer"),
    ],
)
def test_a_service_that_fails_changes_nothing(
    submit: Submit, job_file: Path, canned: str, kind: str | None, said: str
) -> None:
    comment = f"gpumemnet:{job_file}"
    outcome = submit(url=f"{canned}/{kind}" if kind else "http://127.0.0.1:1", comment=comment)
    assert_unchanged(outcome, comment)
    assert said in outcome.said


@needs_curl
def test_a_job_that_is_none_is_refused_by_the_real_service(submit: Submit, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for text, said in (('{"family": "mlp"}', "(422)"), ("not json", "(422)"), ("{}, 1", "(422)")):
        path.write_text(text)
        outcome = submit(comment=f"gpumemnet:{path}")
        assert_unchanged(outcome, f"gpumemnet:{path}")
        assert said in outcome.said


@needs_curl
@pytest.mark.parametrize(
    "environment",
    [
        {"GPUMEMNET_MIB_PER_SHARD": "many"},
        {"GPUMEMNET_TIMEOUT_SECONDS": "-1"},
        {"GPUMEMNET_API_KEY_FILE": "/nowhere"},
        {"GPUMEMNET_GPU": "no such GPU"},
        {"GPUMEMNET_URL": "http://127.0.0.1:1\nurl = file:///etc/passwd"},
        {"PATH": "/nowhere"},
    ],
)
def test_wrong_settings_change_nothing(
    engine: str, service: RunningService, job_file: Path, environment: Texts
) -> None:
    comment = f"gpumemnet:{job_file}"
    settings = {"GPUMEMNET_URL": service.url} | environment
    outcome = run_lua(
        engine, FILTER, "slurm_cli_pre_submit", settings, {"type": "sbatch", "comment": comment}
    )
    assert_unchanged(outcome, comment)


def test_a_missing_an_empty_and_an_oversized_description_change_nothing(
    submit: Submit, tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_bytes(b" " * (4 * 2**20 + 1))
    for name in ("missing", "empty", "large"):
        comment = f"gpumemnet:{tmp_path / name}"
        assert_unchanged(submit(comment=comment), comment)


@needs_curl
def test_a_key_reaches_the_service_and_not_the_process_list(
    engine: str, start_service: StartService, job_file: Path, tmp_path: Path
) -> None:
    key = "a-key-of-forty-characters-or-thereabouts"
    key_file = tmp_path / "key"
    key_file.write_text(key + "\n")
    spy = tmp_path / "bin"
    spy.mkdir()
    real = shutil.which("curl")
    (spy / "curl").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/seen\nexec {real} "$@"\n'
    )
    (spy / "curl").chmod(0o755)
    digest = hashlib.sha256(key.encode()).hexdigest()
    with start_service(
        GPUMEMNET_API_KEYS=f"slurm:predict:{digest}", GPUMEMNET_DATABASE_URL="off"
    ) as running:
        environment = {"GPUMEMNET_URL": running.url, "PATH": f"{spy}:{os.environ['PATH']}"}
        options = {"type": "sbatch", "comment": f"gpumemnet:{job_file}"}
        without = run_lua(engine, FILTER, "slurm_cli_pre_submit", environment, options)
        assert_unchanged(without, options["comment"])
        assert "(401)" in without.said
        environment["GPUMEMNET_API_KEY_FILE"] = str(key_file)
        with_key = run_lua(engine, FILTER, "slurm_cli_pre_submit", environment, options)
    assert re.fullmatch(f"gpumemnet:{UUID}", with_key.options["comment"])
    assert key not in (tmp_path / "seen").read_text()


# In the controller
# -------------------------------------------------------------------------------------------------------


@pytest.fixture
def controller(tmp_path: Path) -> Submit:
    """Runs job_submit.lua as slurmctld would, on a site whose smallest GPU has 40 shards."""
    script = tmp_path / "job_submit.lua"
    text = SUBMIT.read_text()
    assert "SHARDS_PER_GPU = 0" in text
    script.write_text(text.replace("SHARDS_PER_GPU = 0", "SHARDS_PER_GPU = 40"))
    return lambda **fields: run_lua("lua54", script, "slurm_job_submit", {}, fields)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("gres/shard:41", "gres/shard:40"),
        ("gres:shard:100", "gres:shard:40"),
        ("gres/shard:a100:64", "gres/shard:a100:40"),
        ("gres/shard=99,gres/tmp:5", "gres/shard=40,gres/tmp:5"),
        ("gres/shard:40", "gres/shard:40"),
        ("gres/gpu:64", "gres/gpu:64"),
        ("gres/shard:many", "gres/shard:many"),
    ],
)
def test_the_controller_caps_shards_at_one_gpu(
    controller: Submit, resources: str, expected: str
) -> None:
    outcome = controller(comment=f"gpumemnet:{ID}", tres_per_node=resources)
    assert outcome.returned == "0"
    assert outcome.options["tres_per_node"] == expected
    assert outcome.options["admin_comment"] == f"gpumemnet:{ID}"
    assert bool(outcome.said) == (resources != expected)
