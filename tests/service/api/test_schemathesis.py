"""Schemathesis asks every operation of the API's description, and follows its links, with all
checks and with keys set.

GPUMEMNET_SCHEMATHESIS_CASES sets the most cases of an operation in each phase; with 400, as in
`make nightly`, all operations together get more than 10,000.  `pytest -s` shows how many there
were.
"""

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from tests.conftest import StartService

CASES = os.environ.get("GPUMEMNET_SCHEMATHESIS_CASES", "2")
CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
KEY = "key-of-the-schemathesis-test"
PHASES = ("examples", "coverage", "fuzzing", "stateful")


def test_the_service_keeps_to_its_description(start_service: StartService, tmp_path: Path) -> None:
    keys = f"all:predict+observe:{sha256(KEY.encode()).hexdigest()}"
    report = tmp_path / "report.json"
    with start_service(
        GPUMEMNET_API_KEYS=keys, GPUMEMNET_REGISTRY=str(tmp_path / "registry")
    ) as running:
        command = [
            "schemathesis",
            "--config-file",
            str(CONFIGURATION),
            "run",
            f"{running.url}/openapi.json",
        ]
        options = [
            "--max-examples",
            CASES,
            "--continue-on-failure",
            "--request-timeout",
            "300",
            "--header",
            f"Authorization: Bearer {KEY}",
        ]
        done = subprocess.run(
            [*command, *options, "--report", "json", "--report-json-path", str(report)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        assert "Traceback" not in running.log.read_text()
    found = json.loads(report.read_text())
    print(
        f"Schemathesis: {found['test_cases']['generated']:,} cases of {found['operations']['tested']} operations"
    )
    assert found["complete"] is True
    assert found["operations"]["tested"] == found["operations"]["total"] > 10
    assert [found["phases"][phase]["status"] for phase in PHASES] == ["success"] * len(PHASES)
    assert found["test_cases"]["generated"] > (10_000 if int(CASES) >= 400 else 500)
