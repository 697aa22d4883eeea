"""Creates the tables of jobs, predictions, challenger predictions and observations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "jobs",
        sa.Column("hash", sa.String(64), primary_key=True, comment="SHA-256 of the document"),
        sa.Column("family", sa.String(32), nullable=False),
        sa.Column(
            "document",
            sa.JSON,
            nullable=False,
            comment="the job as gpumemnet.job.json_codec reads it",
        ),
        sa.Column(
            "seen_at",
            sa.Double,
            nullable=False,
            comment="when it was last asked about, to the hour or so",
        ),
    )
    op.create_table(
        "predictions",
        sa.Column(
            "id", sa.String(36), primary_key=True, comment="UUID of version 7: sorts by the time"
        ),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("job_hash", sa.String(64), sa.ForeignKey("jobs.hash"), nullable=False),
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("model_name", sa.String(200), nullable=False),
        sa.Column("release", sa.String(200), nullable=False),
        sa.Column("gpu", sa.String(100), nullable=False),
        sa.Column("coverage", sa.Double, nullable=False),
        sa.Column("expected_bytes", sa.BigInteger, nullable=False),
        sa.Column("safe_bytes", sa.BigInteger, comment="null outside the model's support"),
        sa.Column("in_support", sa.Boolean, nullable=False),
        sa.Index("predictions_job_hash", "job_hash"),
    )
    op.create_table(
        "challenges",
        sa.Column(
            "prediction_id",
            sa.String(36),
            primary_key=True,
            comment="of the prediction that the challenger was asked beside",
        ),
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("expected_bytes", sa.BigInteger, nullable=False),
        sa.Column("safe_bytes", sa.BigInteger),
    )
    op.create_table(
        "observations",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("prediction_id", sa.String(36), sa.ForeignKey("predictions.id")),
        sa.Column("job_hash", sa.String(64), sa.ForeignKey("jobs.hash"), nullable=False),
        sa.Column("family", sa.String(32), nullable=False),
        sa.Column("gpu", sa.String(100), nullable=False),
        sa.Column("peak_bytes", sa.BigInteger, comment="null only where the job ran out of memory"),
        sa.Column("oom", sa.Boolean, nullable=False),
        sa.Column("limit_bytes", sa.BigInteger, comment="what the job could have had"),
        sa.Column("source", sa.String(40), nullable=False),
        sa.Column("driver", sa.String(100)),
        sa.Column("cuda", sa.String(100)),
        sa.Column("torch", sa.String(100)),
        sa.Column("observed_at", sa.Double),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column(
            "key_name",
            sa.String(100),
            nullable=False,
            comment="name of the API key that it came with; empty without",
        ),
        sa.Column(
            "idempotency_key",
            sa.String(200),
            nullable=False,
            comment="the reporter's, or the content's hash",
        ),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.UniqueConstraint("idempotency_key", "key_name", name="observations_once"),
        sa.Index("observations_received_at", "received_at"),
        sa.Index("observations_family_received_at", "family", "received_at"),
        sa.Index("observations_prediction_id", "prediction_id"),
        sa.Index("observations_job_hash", "job_hash"),
    )
