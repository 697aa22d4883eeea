"""The database of the observations: its supported URLs, its connections, its tables, and their
revision.

Several services may start at once on one database: one of them makes or migrates the tables, and
the others wait for it.
"""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import orjson
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    ForeignKey,
    Index,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    select,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from gpumemnet.atomic_files import locked
from gpumemnet.errors import GpumemnetError, first_line

REVISIONS: Final = ("0001", "0002", "0003", "0004")
"""The revisions of the tables that this version knows, oldest first; it works with the last."""
HEAD: Final = REVISIONS[-1]
MIGRATIONS: Final = {
    "0001": "ALTER TABLE predictions ADD COLUMN reason_codes VARCHAR(200)",
    # held what a challenger had predicted beside the champion
    "0002": "DROP TABLE challenges",
    # held short names of the reasons for which there was no limit
    "0003": "ALTER TABLE predictions DROP COLUMN reason_codes",
}
"""What makes each revision the next one."""
VERSION_TABLE: Final = "gpumemnet_schema"
"""The table with the revision; other programs may keep their tables in the same
database."""

METADATA: Final = MetaData()

JOBS: Final = Table(
    "jobs",
    METADATA,
    # SHA-256 of the document
    Column("hash", String(64), primary_key=True),
    Column("family", String(32), nullable=False),
    # the job as gpumemnet.job.json_codec reads it
    Column("document", JSON, nullable=False),
    # when it was last asked about, to the hour or so
    Column("seen_at", Double, nullable=False),
)

PREDICTIONS: Final = Table(
    "predictions",
    METADATA,
    # UUID of version 7: sorts by the time
    Column("id", String(36), primary_key=True),
    Column("made_at", Double, nullable=False),
    Column("job_hash", String(64), ForeignKey("jobs.hash"), nullable=False),
    Column("model_sha256", String(64), nullable=False),
    Column("model_name", String(200), nullable=False),
    Column("release", String(200), nullable=False),
    Column("gpu", String(100), nullable=False),
    Column("coverage", Double, nullable=False),
    Column("expected_bytes", BigInteger, nullable=False),
    # null outside the model's support
    Column("safe_bytes", BigInteger),
    Column("in_support", Boolean, nullable=False),
    Index("predictions_job_hash", "job_hash"),
)

OBSERVATIONS: Final = Table(
    "observations",
    METADATA,
    Column("id", String(36), primary_key=True),
    Column("prediction_id", String(36), ForeignKey("predictions.id")),
    Column("job_hash", String(64), ForeignKey("jobs.hash"), nullable=False),
    Column("family", String(32), nullable=False),
    Column("gpu", String(100), nullable=False),
    # null only where the job ran out of memory
    Column("peak_bytes", BigInteger),
    Column("oom", Boolean, nullable=False),
    # what the job could have had
    Column("limit_bytes", BigInteger),
    Column("source", String(40), nullable=False),
    Column("driver", String(100)),
    Column("cuda", String(100)),
    Column("torch", String(100)),
    Column("observed_at", Double),
    Column("received_at", Double, nullable=False),
    # name of the API key that it came with; empty without
    Column("key_name", String(100), nullable=False),
    # the reporter's, or the content's hash
    Column("idempotency_key", String(200), nullable=False),
    Column("content_hash", String(64), nullable=False),
    UniqueConstraint("idempotency_key", "key_name", name="observations_once"),
    Index("observations_received_at", "received_at"),
    Index("observations_family_received_at", "family", "received_at"),
    Index("observations_prediction_id", "prediction_id"),
    Index("observations_job_hash", "job_hash"),
)

VERSIONS: Final = Table(
    VERSION_TABLE, METADATA, Column("version_num", String(32), primary_key=True)
)

BUSY_SECONDS: Final = 5.0
"""How long a write waits for a write of another process."""
CONNECT_SECONDS: Final = 3
MIGRATION_SECONDS: Final = 120
MIGRATION_LOCK: Final = 0x6770756D656D
"""Key of PostgreSQL's advisory lock, which lets one process migrate at a time."""

_READS: Final = "gpumemnet_reads"


class DatabaseError(GpumemnetError):
    """The database cannot be used: an unsupported kind, a newer schema, or a missing permission."""


class DatabaseAwayError(DatabaseError):
    """The database cannot be reached now, but perhaps later."""


def database_url(address: str) -> URL:
    """The URL with its driver.

    Raises:
        DatabaseError: when it is not a URL, or the database is not supported.
    """
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        raise DatabaseError(
            "the database's URL cannot be read: it looks like sqlite:////var/lib/gpumemnet/observations.sqlite "
            "or postgresql://user:password@host/database"
        ) from None
    kind = url.get_backend_name()
    if kind in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise DatabaseError(
            f"the database is of the kind '{kind}': it must be sqlite or postgresql"
        )
    if not url.database or url.database == ":memory:":
        raise DatabaseError(
            "an SQLite database must be a file, or its observations would be lost: sqlite:////path/of/the/file"
        )
    return url.set(drivername="sqlite+pysqlite")


def make_engine(url: URL, *, busy_seconds: float = BUSY_SECONDS) -> Engine:
    """An engine with one connection; it is opened after any fork and used by one thread at a time.

    SQLite keeps a write-ahead log and syncs every commit to the disk (``synchronous=FULL``);
    PostgreSQL does so by default.

    Raises:
        DatabaseError: when the driver is not installed.
    """
    arguments: dict[str, Any]
    if url.get_backend_name() == "sqlite":
        arguments = {"timeout": busy_seconds, "check_same_thread": False}
    else:
        milliseconds = int(1000 * max(busy_seconds, 1))
        arguments = {
            "connect_timeout": CONNECT_SECONDS,
            "options": f"-c statement_timeout={2 * milliseconds} -c lock_timeout={milliseconds}",
            "tcp_user_timeout": 2 * milliseconds,
            "application_name": "gpumemnet",
        }
    try:
        engine = create_engine(
            url,
            connect_args=arguments,
            pool_size=1,
            max_overflow=0,
            json_serializer=lambda document: orjson.dumps(document).decode(),
            json_deserializer=orjson.loads,
            hide_parameters=True,
        )
    except (NoSuchModuleError, ImportError):
        raise DatabaseError(
            f"the driver for {shown(url)} is not installed: install the extra, in a clone with  pip install -e '.[postgres]'"
        ) from None
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def reading(engine: Engine) -> Connection:
    """A connection for a read-only transaction: in SQLite it does not wait for writers."""
    return engine.connect().execution_options(**{_READS: True})


def shown(url: URL) -> str:
    """``url`` for a log: without the password."""
    return url.render_as_string(hide_password=True)


def ensure_schema(url: URL) -> None:
    """Create or migrate the database's tables unless they are those of this version.

    Raises:
        DatabaseAwayError: when the database cannot be reached.
        DatabaseError: when its schema is newer than this version, or cannot be migrated; nothing
            has changed then.
    """
    _make_folder(url)
    engine = make_engine(url, busy_seconds=MIGRATION_SECONDS)
    try:
        _migrate(engine)
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:  # TimeoutError is an OSError
        raise _unusable(url, error) from None
    finally:
        engine.dispose()


def _migrate(engine: Engine) -> None:
    """Make the tables, or change them to the newest revision, in one transaction."""
    with ExitStack() as stack:
        if engine.dialect.name == "sqlite":
            lock = Path(f"{engine.url.database}.migration-lock")
            busy = TimeoutError("another process is making its tables")
            stack.enter_context(locked(lock, MIGRATION_SECONDS, busy))
            with engine.connect() as outside:  # a transaction cannot change it
                outside.connection.execute("PRAGMA journal_mode = WAL")
        connection = stack.enter_context(engine.begin())
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        found = revision(connection)
        check_revision(found, engine.url)
        if found is None:
            METADATA.create_all(connection)
            connection.execute(VERSIONS.insert(), {"version_num": HEAD})
        elif found != HEAD:
            for earlier in REVISIONS[REVISIONS.index(found) : -1]:
                connection.execute(text(MIGRATIONS[earlier]))
            connection.execute(VERSIONS.update(), {"version_num": HEAD})


def revision(connection: Connection) -> str | None:
    """The tables' revision; ``None`` in a database without the service's tables.

    Raises:
        SQLAlchemyError: when the query fails.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(select(VERSIONS.c.version_num)).scalar()


def check_revision(found: str | None, url: URL) -> None:
    """Reject a database whose revision is unknown to this version.

    Raises:
        DatabaseError: names the revision.
    """
    if found is not None and found not in REVISIONS:
        raise DatabaseError(
            f"the database {shown(url)} was written by a newer gpumemnet (its schema is {found[:20]}, and this version knows "
            f"those up to {HEAD}): upgrade gpumemnet, or give it another database"
        )


def _make_folder(url: URL) -> None:
    if url.get_backend_name() == "sqlite" and url.database:
        folder = Path(url.database).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"the folder {folder} of the database cannot be made ({error.strerror}): set "
                "GPUMEMNET_DATABASE_URL to another database, or to 'off'"
            ) from None


def cause_text(error: Exception) -> str:
    """What the driver says of an error, in one line."""
    return first_line(getattr(error, "orig", None) or error)


def _unusable(url: URL, error: Exception) -> DatabaseError:
    reason = cause_text(error)
    if url.get_backend_name() == "postgresql":
        return DatabaseAwayError(f"the database {shown(url)} cannot be reached: {reason}")
    return DatabaseError(f"the database {shown(url)} cannot be used: {reason}")


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # _begin_sqlite begins the transactions, not the driver
    for pragma in ("synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then writes fails at once when another process has written
    # in between.
    reads = connection.get_execution_options().get(_READS, False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
