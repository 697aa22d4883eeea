"""The log: one line of JSON an event, without keys, bodies and control characters."""

import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.atomic_files import Document
from service.api.monitoring import LineFormatter
from tests.conftest import RunningService
from tests.waiting import wait_until

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_each_request_is_a_line_of_json(service: RunningService, job: Document) -> None:
    start = service.log.read_text().splitlines()[0]
    assert json.loads(start)["message"].startswith(f"listening on {service.url} ")
    with httpx.Client(base_url=service.url) as client, service.log.open() as log:
        log.seek(0, io.SEEK_END)
        client.post(
            "/v1/predict",
            json={"job": job},
            headers={"X-Request-ID": "one", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
        )
        client.get("/page/anything-at-all", headers={"traceparent": "nonsense"})
        client.get("/some/other/path")
        lines: list[str] = []

        def has_read() -> bool:
            lines.extend(log)
            return len(lines) >= 3

        wait_until(has_read)
    text = "".join(lines)
    events = [json.loads(line) for line in lines]
    assert [event["message"] for event in events] == ["request"] * 3
    assert all(re.fullmatch(TIME, event["time"]) for event in events)
    first = events[0]
    assert first["seconds"] > 0
    assert first["bytes"] > 100
    expected = {
        "level": "info",
        "process": service.process.pid,
        "request_id": "one",
        "trace_id": TRACE,
        "method": "POST",
        "path": "/v1/predict",
        "status": 200,
    }
    assert expected.items() <= first.items()
    assert [event["path"] for event in events[1:]] == ["/page/{file}", "{other}"]
    assert not [event for event in events[1:] if "trace_id" in event]
    assert "anything-at-all" not in text


def record(message: str, **options: Any) -> logging.LogRecord:
    return logging.LogRecord("any", logging.WARNING, "file", 1, message, (), **options)


@given(message=st.text(max_size=200) | st.just("x" * 10_000) | st.just("\ud800"))
def test_any_message_is_one_short_line(message: str) -> None:
    line = LineFormatter().format(record(message, exc_info=None))
    assert "\n" not in line
    assert len(line) < 4096
    assert not re.search(r"[\x00-\x1f]", line)
    assert json.loads(line)["level"] == "warning"


def test_a_failure_says_where_it_happened() -> None:
    try:
        int("x")
    except ValueError:
        failure = record("a request failed", exc_info=sys.exc_info())
    event = json.loads(LineFormatter().format(failure))
    assert event["error"].startswith("ValueError: invalid literal")
    assert Path(__file__).name in event["where"][0]
