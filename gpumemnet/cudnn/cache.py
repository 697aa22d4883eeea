"""Keeps cuDNN's answers on disk, for all processes of a user."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

_WAIT_SECONDS: Final = 5.0
_TABLE: Final = "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID"


def default_cache_file() -> Path:
    """Return the file in the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``)."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "gpumemnet"
        / "cudnn-plans.sqlite3"
    )


class AnswerCache:
    """Answers by version of cuDNN, device and question.

    SQLite makes each write atomic and lets several processes use the file.  A cache that cannot be
    read or written is no error: cuDNN is asked again.

    Args:
        file: the database; made when it is first written to.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def get(
        self, version: int, device: Mapping[str, Any], question: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the answer; ``None`` if there is none."""
        if not self._file.is_file():
            return None
        try:
            with closing(sqlite3.connect(self._file, timeout=_WAIT_SECONDS)) as database:
                row = database.execute(
                    "SELECT answer FROM answers WHERE question = ?",
                    [_key(version, device, question)],
                )
                found = row.fetchone()
            return None if found is None else dict(json.loads(found[0]))
        except (sqlite3.Error, ValueError):
            return None

    def put(
        self,
        version: int,
        device: Mapping[str, Any],
        question: Mapping[str, Any],
        answer: Mapping[str, Any],
    ) -> None:
        """Store an answer."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._file, timeout=_WAIT_SECONDS)) as database, database:
                database.execute(_TABLE)
                values = [_key(version, device, question), json.dumps(answer)]
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", values)
        except (OSError, sqlite3.Error):
            return


def _key(version: int, device: Mapping[str, Any], question: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps([version, device, question], sort_keys=True).encode()
    ).hexdigest()
