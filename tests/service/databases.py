"""Databases for tests: a file of SQLite, and a PostgreSQL server that is started for them and can
be stopped and started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

UNPRIVILEGED = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]


def server_program(name: str) -> str | None:
    """A program of the PostgreSQL server, on the path or where Debian puts it."""
    found = shutil.which(name)
    if found:
        return found
    return next(
        (
            str(path)
            for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
        ),
        None,
    )


@dataclass
class PostgreSQL:
    folder: Path
    port: int

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} -c listen_addresses= -c fsync=on -c max_connections=30"
        self._control("start", "-l", str(self.folder / "log"), "-o", options)

    def stop(self) -> None:
        self._control("stop", "-m", "immediate")

    def url(self, database: str) -> str:
        return f"postgresql://tester@/{database}?host={self.folder}&port={self.port}"

    def execute(self, statement: str) -> None:
        with psycopg.connect(
            host=str(self.folder), port=self.port, user="tester", dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(statement)

    def _control(self, *arguments: str) -> None:
        program = server_program("pg_ctl")
        assert program
        run_as_server([program, "-D", str(self.folder / "data"), "-w", *arguments])


def run_as_server(command: list[str]) -> None:
    """Run a program of the server, which refuses to run as root."""
    prefix = UNPRIVILEGED if os.geteuid() == 0 else []
    done = subprocess.run(
        [*prefix, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=300, cwd="/"
    )
    assert done.returncode == 0, done.stderr.decode()


@contextmanager
def running_postgresql() -> Iterator[PostgreSQL]:
    """A server of one's own; skips the test where none is installed."""
    initdb = server_program("initdb")
    if initdb is None or server_program("pg_ctl") is None:
        pytest.skip("no PostgreSQL server is installed (initdb and pg_ctl)")
    folder = Path(
        tempfile.mkdtemp(prefix="gpumemnet-pg-")
    )  # short: a socket's path has 107 characters at most
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody", "nogroup")
        run_as_server(
            [
                initdb,
                "-D",
                str(folder / "data"),
                "-U",
                "tester",
                "--auth=trust",
                "-E",
                "UTF8",
                "--no-sync",
            ]
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = PostgreSQL(folder, port)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
