"""The tables of the service's database, the same in SQLite and PostgreSQL.

Migrations (``migrations/``) create them; a test checks that both agree.  Amounts are bytes, times
seconds since 1970.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

REVISIONS: Final = ("0001", "0002")
"""The schema revisions that this version knows, oldest first; it works with the last."""
HEAD: Final = REVISIONS[-1]
VERSION_TABLE: Final = "gpumemnet_schema"
"""The table in which Alembic stores the revision; other programs may keep their tables in the same
database."""

METADATA: Final = MetaData()

JOBS: Final = Table(
    "jobs",
    METADATA,
    Column("hash", String(64), primary_key=True, comment="SHA-256 of the document"),
    Column("family", String(32), nullable=False),
    Column(
        "document", JSON, nullable=False, comment="the job as gpumemnet.job.json_codec reads it"
    ),
    Column(
        "seen_at", Double, nullable=False, comment="when it was last asked about, to the hour or so"
    ),
)

PREDICTIONS: Final = Table(
    "predictions",
    METADATA,
    Column("id", String(36), primary_key=True, comment="UUID of version 7: sorts by the time"),
    Column("made_at", Double, nullable=False),
    Column("job_hash", String(64), ForeignKey("jobs.hash"), nullable=False),
    Column("model_sha256", String(64), nullable=False),
    Column("model_name", String(200), nullable=False),
    Column("release", String(200), nullable=False),
    Column("gpu", String(100), nullable=False),
    Column("coverage", Double, nullable=False),
    Column("expected_bytes", BigInteger, nullable=False),
    Column("safe_bytes", BigInteger, comment="null outside the model's support"),
    Column("in_support", Boolean, nullable=False),
    Column(
        "reason_codes",
        String(200),
        comment="why there is no limit: short names, separated by commas; null with a limit",
    ),
    Index("predictions_job_hash", "job_hash"),
)

CHALLENGES: Final = Table(
    "challenges",
    METADATA,
    Column(
        "prediction_id",
        String(36),
        primary_key=True,
        comment="of the prediction that the challenger was asked beside",
    ),
    Column("model_sha256", String(64), nullable=False),
    Column("expected_bytes", BigInteger, nullable=False),
    Column("safe_bytes", BigInteger),
)

OBSERVATIONS: Final = Table(
    "observations",
    METADATA,
    Column("id", String(36), primary_key=True),
    Column("prediction_id", String(36), ForeignKey("predictions.id")),
    Column("job_hash", String(64), ForeignKey("jobs.hash"), nullable=False),
    Column("family", String(32), nullable=False),
    Column("gpu", String(100), nullable=False),
    Column("peak_bytes", BigInteger, comment="null only where the job ran out of memory"),
    Column("oom", Boolean, nullable=False),
    Column("limit_bytes", BigInteger, comment="what the job could have had"),
    Column("source", String(40), nullable=False),
    Column("driver", String(100)),
    Column("cuda", String(100)),
    Column("torch", String(100)),
    Column("observed_at", Double),
    Column("received_at", Double, nullable=False),
    Column(
        "key_name",
        String(100),
        nullable=False,
        comment="name of the API key that it came with; empty without",
    ),
    Column(
        "idempotency_key",
        String(200),
        nullable=False,
        comment="the reporter's, or the content's hash",
    ),
    Column("content_hash", String(64), nullable=False),
    UniqueConstraint("idempotency_key", "key_name", name="observations_once"),
    Index("observations_received_at", "received_at"),
    Index("observations_family_received_at", "family", "received_at"),
    Index("observations_prediction_id", "prediction_id"),
    Index("observations_job_hash", "job_hash"),
)
