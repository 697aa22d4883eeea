"""The log: one line an event whatever is logged, in JSON or as text, and never in the way of an
answer."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api.predictions import Document
from service.middleware.keys import new_key
from service.middleware.log_sink import MAX_BLOCK_BYTES, LogSink
from service.middleware.logs import LogHandler, LogWriter
from tests.conftest import StartService
from tests.environments import environment_without_settings
from tests.waiting import wait_until

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def wait_for(log: Path, pattern: str) -> str:
    wait_until(
        lambda: re.search(pattern, log.read_text()) is not None,
        lambda: f"{pattern} is not in the log:\n{log.read_text()}",
    )
    return log.read_text()


def test_each_request_is_a_line_of_json(start_service: StartService, job: Document) -> None:
    with start_service() as running:
        httpx.post(
            f"{running.url}/v1/predict?field=limit_mib",
            json={"job": job},
            headers={"X-Request-ID": "one"},
        )
        httpx.get(f"{running.url}/page/anything-at-all")
        httpx.get(f"{running.url}/some/other/path")
        lines = [json.loads(line) for line in wait_for(running.log, r"\{other\}").splitlines()]
    assert [line["message"] for line in lines] == [f"listening on {running.url} with 1 worker"] + [
        "request"
    ] * 3
    assert all(re.fullmatch(TIME, line["time"]) for line in lines)
    first = lines[1]
    assert first["seconds"] > 0
    assert first["bytes"] > 100
    expected = {
        "level": "info",
        "request_id": "one",
        "method": "POST",
        "path": "/v1/predict",
        "status": 200,
    }
    assert expected.items() <= first.items()
    assert [line["path"] for line in lines[2:]] == ["/page/{file}", "{other}"]
    assert "anything-at-all" not in running.log.read_text()


def test_text_is_for_people(start_service: StartService) -> None:
    with start_service("--log-format", "text") as running:
        httpx.get(f"{running.url}/healthz")
        lines = wait_for(running.log, "/healthz").splitlines()
    assert re.fullmatch(rf"{TIME} info     listening on {running.url} with 1 worker .*", lines[0])
    assert re.fullmatch(
        rf"{TIME} info     request request_id=\w+ method=GET path=/healthz status=200 seconds=\S+ bytes=\d+",
        lines[1],
    )


def test_a_higher_level_leaves_requests_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "service", "--port", str(port), "--log-level", "warning"]
    with (tmp_path / "log").open("wb") as stream:
        process = subprocess.Popen(
            command, stderr=stream, env=environment_without_settings(GPUMEMNET_DATABASE_URL="off")
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            assert answers(client, 60)
            assert client.get("/nothing").status_code == 404
    finally:
        process.terminate()
        assert process.wait(timeout=300) == 0
    assert (tmp_path / "log").read_text() == ""


def answers(client: httpx.Client, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return client.get("/healthz").status_code == 200
        except httpx.ConnectError:
            time.sleep(0.05)
    return False


def test_a_wrong_setting_is_said_before_there_is_a_log(start_service: StartService) -> None:
    with start_service("--log-level", "info", GPUMEMNET_WORKER="2") as running:
        assert "GPUMEMNET_WORKER is no setting of the service" in running.log.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "service", "--port", "x", "--log-level", "error"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.startswith("gpumemnet service: --port must be")


def test_what_the_server_says_has_the_same_form(
    start_service: StartService, tmp_path: Path
) -> None:
    (_, entry), keys = new_key("one", "predict"), tmp_path / "keys"
    keys.write_text(entry)
    with start_service(GPUMEMNET_API_KEYS_FILE=str(keys)) as running:
        keys.write_text("nonsense")
        running.process.send_signal(signal.SIGHUP)
        lines = [
            json.loads(line) for line in wait_for(running.log, "stay as they were").splitlines()
        ]
    assert (lines[-1]["level"], lines[-1]["logger"]) == ("error", "gpumemnet.service")


def written(
    tmp_path_factory: pytest.TempPathFactory, log_format: str, log: Callable[[logging.Logger], None]
) -> bytes:
    """The lines that ``log(logger)`` writes."""
    path = tmp_path_factory.mktemp("log") / "log"
    logger = logging.Logger("a.logger")
    with path.open("wb") as stream:
        writer = LogWriter(LogSink(stream.fileno()), log_format, logging.DEBUG)
        handler = LogHandler(writer)
        logger.addHandler(handler)
        log(logger)
    return path.read_bytes()


def warning(text: str) -> Callable[[logging.Logger], None]:
    return lambda logger: logger.warning("%s", text)


@given(st.text() | st.text(alphabet="\n\r\t\0\x1b\x7f\x85\u2028é\ud800 ab", max_size=4000))
@settings(max_examples=100)
def test_no_text_breaks_out_of_its_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    as_json = written(tmp_path_factory, "json", warning(text))
    assert len(as_json.splitlines()) == 1
    message = json.loads(as_json)["message"]
    assert text.encode("utf-8", "replace").decode().startswith(message.removesuffix("…"))
    as_text = written(tmp_path_factory, "text", warning(text)).decode(errors="replace")
    assert len(as_text.splitlines()) == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", as_text)
    assert max(len(as_json), len(as_text.encode())) <= MAX_BLOCK_BYTES + 4


def test_a_failure_says_where_and_is_no_traceback(tmp_path_factory: pytest.TempPathFactory) -> None:
    def log(logger: logging.Logger) -> None:
        def fail() -> None:
            raise ValueError("two\nlines")

        try:
            fail()
        except ValueError:
            logger.exception("it failed")

    (line,) = written(tmp_path_factory, "json", log).splitlines()
    document = json.loads(line)
    assert document["error"] == "ValueError: two\nlines"
    assert document["where"][0].endswith(" fail")
    assert b"Traceback" not in line


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_file_of_a_name_that_is_no_text_can_be_named(
    tmp_path_factory: pytest.TempPathFactory, log_format: str
) -> None:
    def log(logger: logging.Logger) -> None:
        names: dict[str, Any] = {}
        exec(compile("def fail():\n    raise ValueError", "bad\udcff.py", "exec"), names)
        try:
            names["fail"]()
        except ValueError:
            logger.exception("it failed")

    (line,) = written(tmp_path_factory, log_format, log).decode().splitlines()
    assert (
        r"bad\udcff.py:2 fail" if log_format == "text" else "bad?.py:2 fail"
    ) in line  # text shows a list as Python does


def test_a_long_line_is_cut_between_characters(tmp_path_factory: pytest.TempPathFactory) -> None:
    for lead in range(3):
        line = written(tmp_path_factory, "text", warning("a" * lead + "€" * 2400))
        assert MAX_BLOCK_BYTES - 3 <= len(line) <= MAX_BLOCK_BYTES
        assert line.decode().endswith("€\n")


def test_arguments_that_do_not_match_are_logged_all_the_same(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (line,) = written(
        tmp_path_factory, "json", lambda logger: logger.info("%d jobs", "many")
    ).splitlines()
    assert json.loads(line)["message"] == "%d jobs ('many',)"


def test_a_reader_that_stalls_holds_nobody_up_and_what_is_lost_is_counted() -> None:
    reading, writing = os.pipe()
    sink = LogSink(writing, max_waiting_bytes=300_000)
    sink.start()
    line = b"x" * 999 + b"\n"
    began = time.monotonic()
    for _ in range(2000):
        sink.write(line)
    assert time.monotonic() - began < 60  # and not for ever
    received: list[bytes] = []

    def read() -> None:
        while chunk := os.read(reading, 65536):
            received.append(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    sink.close()
    os.close(writing)
    thread.join()
    os.close(reading)
    whole = b"".join(received).split(b"\n")
    assert set(whole) == {line[:-1], b""}
    assert sink.dropped > 0
    assert len(whole) - 1 + sink.dropped == 2000


def test_a_reader_that_has_gone_is_no_failure() -> None:
    reading, writing = os.pipe()
    sink = LogSink(writing)
    sink.start()
    os.close(reading)
    sink.write(b"lost\n", is_urgent=True)
    sink.close()
    os.close(writing)
    assert sink.dropped == 1


def test_the_service_answers_on_when_nobody_reads_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service", "--port", "0"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        env=environment_without_settings(GPUMEMNET_DATABASE_URL="off"),
    )
    try:
        assert process.stderr is not None
        found = re.search(r"listening on (http://\S+)", process.stderr.readline().decode())
        assert found is not None
        with httpx.Client(
            base_url=found[1], timeout=300
        ) as client:  # a pipe holds 64 KiB: some 400 lines
            assert {client.get("/healthz").status_code for _ in range(1500)} == {200}
    finally:
        process.terminate()
        if process.stderr is not None:
            process.stderr.close()
        assert process.wait(timeout=300) == 0
