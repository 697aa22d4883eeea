"""``python -m service.observations.migrate``: migrates a database's tables to this version; reads
its URL from standard input.

Several services may start at once on one database: one of them migrates, and the others wait for
it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from gpumemnet.atomic_files import locked
from gpumemnet.errors import GpumemnetError, first_line

from .database import (
    METADATA,
    MIGRATION_LOCK,
    MIGRATION_SECONDS,
    VERSION_TABLE,
    DatabaseError,
    check_revision,
    database_url,
    make_engine,
    revision,
)


def main() -> int:
    """Migrate the database whose URL is on standard input, or the only argument; returns the exit
    code."""
    end_with_parent()  # an unfinished migration is rolled back
    try:
        migrate(database_url(sys.argv[1] if len(sys.argv) == 2 else sys.stdin.read().strip()))
    except GpumemnetError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def end_with_parent() -> None:
    """End this process when its parent dies."""
    parent = os.getppid()

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=poll, name="end-with-parent", daemon=True).start()


def migrate(url: URL) -> None:
    """Migrate the tables to the newest revision.

    Raises:
        DatabaseError: when that fails; nothing has changed then.
    """
    configuration = Config()
    configuration.set_main_option(
        "script_location", str(Path(__file__).parent / "migrations").replace("%", "%%")
    )
    engine = make_engine(url, busy_seconds=MIGRATION_SECONDS)
    try:
        with ExitStack() as stack:
            if url.get_backend_name() == "sqlite":
                stack.enter_context(
                    locked(Path(f"{url.database}.migration-lock"), MIGRATION_SECONDS)
                )
            check_revision(revision(engine), url)
            with engine.begin() as connection:
                if url.get_backend_name() == "postgresql":
                    connection.execute(
                        text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK}
                    )
                configuration.attributes |= {
                    "connection": connection,
                    "metadata": METADATA,
                    "version_table": VERSION_TABLE,
                }
                command.upgrade(configuration, "head")
    except (SQLAlchemyError, OSError) as error:  # TimeoutError is an OSError
        cause = getattr(error, "orig", None) or error
        raise DatabaseError(first_line(cause)) from None
    finally:
        engine.dispose()


if __name__ == "__main__":
    sys.exit(main())
