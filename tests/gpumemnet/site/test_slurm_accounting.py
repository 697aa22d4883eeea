import http.server
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.cli import main
from gpumemnet.errors import InvalidRequestError
from gpumemnet.site.observations import Observation
from gpumemnet.site.sacct import Skipped, read_sacct

FIXTURES = Path(__file__).parents[2] / "fixtures" / "sacct"
JOBS, JSON = FIXTURES / "jobs.json", FIXTURES / "slurm_24_05.json"
GIB = 2**30


def split(
    found: Iterable[Observation | Skipped],
) -> tuple[dict[str, Observation], dict[str, Skipped]]:
    taken: dict[str, Observation] = {}
    skipped: dict[str, Skipped] = {}
    for one in found:
        if isinstance(one, Skipped):
            skipped[one.job_id or one.location] = one
        else:
            assert one.idempotency_key is not None
            taken[one.idempotency_key.rpartition("/")[2]] = one
    return taken, skipped


def test_peaks_of_finished_jobs_are_taken() -> None:
    taken, _ = split(read_sacct(JOBS))
    assert {job: one.peak_bytes for job, one in taken.items()} == {
        "18194943": 38888 * 2**20,
        "18194944": int(6.5 * GIB),  # the highest of several steps, in whatever unit
        "18194945_7": 4 * GIB,
        "18194946": 12000 * 2**20,
        "18194947": 9000 * 2**20,
        "18194956": 30000 * 2**20,  # four GPUs, a task for each
    }
    one = taken["18194943"]
    assert one.prediction_id == "01932f6c-5b1e-7c3a-9d2e-3f4a5b6c7d01"
    assert (one.source, one.oom, one.idempotency_key) == (
        "slurm_gpumem",
        False,
        "slurm/alpine/18194943",
    )
    assert one.observed_at is not None


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("18194948", "host memory"),
        ("18194949", "FAILED"),
        ("18194950", "has not ended"),
        ("18194951", "no prediction is known"),
        ("18194952", "no reading"),
        ("18194953", "no reading"),
        ("18194954", "ran for 31 s"),
        ("18194955", "4 GPUs"),
        ("18194959", "no reading"),
    ],
)
def test_what_is_left_out_has_its_reason(job: str, reason: str) -> None:
    _, skipped = split(read_sacct(JOBS))
    assert reason in skipped[job].reason


def test_nothing_is_lost() -> None:
    taken, skipped = split(read_sacct(JOBS))
    assert len(taken) + len(skipped) == len(json.loads(JOBS.read_text())["jobs"])


@pytest.mark.parametrize("text", ["", "JobID|State\n1|COMPLETED\n", "{", "{}", "[1]"])
def test_a_file_of_another_kind_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(InvalidRequestError):
        list(read_sacct(tmp_path / "x"))


ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**70, "x", [], [7], {}),
    *({"number": "x", "set": True}, [{"count": []}]),
)


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize(
    "name", ["job_id", "state", "time", "comment", "tres", "steps", "array", "cluster"]
)
def test_any_json_is_taken_or_reported(tmp_path: Path, name: str, value: object) -> None:
    document = json.loads(JSON.read_text())
    document["jobs"][0][name] = value
    document["jobs"][1]["steps"][1][name] = value
    file = tmp_path / "x"
    file.write_text(json.dumps(document))
    for one in read_sacct(file):
        assert isinstance(one, Observation) or one.reason


def test_the_command_sends_each_observation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body["source"]))
            status: int = 201
            document: dict[str, object] = {"created": True}
            if len(asked) == 3:
                status, document = 404, {"detail": "there is no prediction"}
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    monkeypatch.setenv("GPUMEMNET_API_KEY", "secret")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        assert main(["observations", "import-sacct", str(JSON), "--url", url]) == 0
        server.shutdown()
    assert asked == [("/v1/observations", "Bearer secret", "slurm_gpumem")] * 3
    assert "left out: the service: there is no prediction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--url"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
    ],
)
def test_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["observations", "import-sacct", str(JOBS), *arguments]) == 2
    assert words in capsys.readouterr().err
