"""``gpumemnet observations export``: writes the observations as a dataset, in the Parquet schema of
the training.

Unknown values stay unknown: the architecture is empty, and the recipe is ``observations``.  A job
that ran out of memory without
a known limit or peak is left out, because it carries no information.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from gpumemnet.gpu import known_profile
from gpumemnet.job.dataset import write_dataset
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.measurement import OBSERVED, Measurement
from gpumemnet.site.observations import PROCESS_OBSERVATIONS

from .database import (
    JOBS,
    OBSERVATIONS,
    DatabaseError,
    cause_text,
    check_revision,
    database_url,
    make_engine,
    reading,
    revision,
    shown,
)

RECIPE: Final = "observations"
PROTOCOL: Final = "observation/1"
_ROWS: Final = 1000


def export(address: str, out: Path, *, since: float | None = None) -> tuple[int, int]:
    """Write the observations received from ``since`` on, in seconds since the epoch.

    Returns:
        The number of observations written, and the number left out.

    Raises:
        DatabaseError: when the database cannot be read, or has another version.
        DatasetError: when the file cannot be written.
        MissingExtraError: when pyarrow is not installed.
    """
    url = database_url(address)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        raise DatabaseError(f"there is no database {shown(url)}")
    engine = make_engine(url)
    left_out = 0

    def measurements(connection: Connection) -> Iterator[Measurement]:
        nonlocal left_out
        for row in _rows(connection, since):
            measurement = _measurement(row)
            if measurement is None:
                left_out += 1
            else:
                yield measurement

    try:
        with reading(engine) as connection:
            found = revision(connection)
            check_revision(found, url)
            if found is None:
                raise DatabaseError(f"the database {shown(url)} holds no observations of a service")
            written = write_dataset(out, measurements(connection))
    except SQLAlchemyError as error:
        raise DatabaseError(
            f"the database {shown(url)} cannot be read: {cause_text(error)}"
        ) from None
    finally:
        engine.dispose()
    return written, left_out


def _rows(connection: Connection, since: float | None) -> Iterator[Any]:
    observed = OBSERVATIONS.c
    question = select(*observed, JOBS.c.document).join(JOBS, JOBS.c.hash == observed.job_hash)
    if since is not None:
        question = question.where(observed.received_at >= since)
    streaming = connection.execution_options(stream_results=True, yield_per=_ROWS)
    yield from streaming.execute(question.order_by(observed.received_at, observed.id))


def _measurement(row: Any) -> Measurement | None:
    capacity_bytes = row.limit_bytes
    if row.oom:  # censored: it needed more than this
        known = [amount for amount in (row.limit_bytes, row.peak_bytes) if amount is not None]
        if not known:
            return None
        capacity_bytes = max(known)
    elif capacity_bytes is None:
        profile = known_profile(row.gpu)  # of an unknown GPU: it held at least the peak
        capacity_bytes = row.peak_bytes if profile is None else profile.capacity_bytes
    of_process = row.source in PROCESS_OBSERVATIONS
    return Measurement(
        job=job_from_dict(row.document),
        status="oom" if row.oom else "ok",
        label_source=row.source,
        capacity_bytes=capacity_bytes,
        provenance=OBSERVED,
        gpu=row.gpu,
        recipe=RECIPE,
        architecture="{}",
        options=json.dumps(
            {"observation": row.id, "observed_at": row.observed_at, "received_at": row.received_at}
        ),
        reason="ran out of GPU memory" if row.oom else None,
        peak_process_bytes=row.peak_bytes if of_process else None,
        peak_device_bytes=None if of_process else row.peak_bytes,
        protocol=PROTOCOL,
        driver=row.driver,
        cuda=row.cuda,
        torch=row.torch,
    )
