"""Fails a test session in which a test was skipped for a reason that nobody agreed to.

A skipped test checks nothing.  ``tests/allowed_skips.txt`` lists the reasons that are accepted;
with ``--strict-skips`` (which CI gives) any other reason fails the session, so that a library that
CI no longer installs is noticed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

LIST: Final = Path(__file__).with_name("allowed_skips.txt")


def allowed_patterns(text: str) -> list[str]:
    """Accepted reasons, one a line, without blank lines and comments; ``*`` stands for any text."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def refused(reasons: Iterable[str], patterns: Iterable[str]) -> Counter[str]:
    """How often each reason occurs that no pattern accepts."""
    accepted = re.compile(
        "|".join(re.escape(pattern).replace(r"\*", ".*") for pattern in patterns) or "(?!)",
        re.DOTALL,
    )
    return Counter(reason for reason in reasons if not accepted.fullmatch(reason))


def add_option(parser: pytest.Parser) -> None:
    """Declare ``--strict-skips``."""
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help="fail when a test skips for a reason that tests/allowed_skips.txt does not list",
    )


def check(session: pytest.Session) -> None:
    """Change the exit status where a skip is refused; the process that distributes tests to others
    sees all their reports."""
    if not session.config.getoption("strict_skips") or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    reports = reporter.stats.get("skipped", [])
    reasons = (
        report.longrepr[2].removeprefix("Skipped: ")
        for report in reports
        if isinstance(report.longrepr, tuple)
    )
    found = refused(reasons, allowed_patterns(LIST.read_text("utf-8")))
    if not found:
        return
    reporter.write_line("")
    reporter.write_line(f"Skips for reasons that {LIST.name} does not list:", red=True)
    for reason, number in sorted(found.items()):
        reporter.write_line(f"  {number} x {reason}", red=True)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
