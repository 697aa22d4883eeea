"""Adds to predictions why they have no limit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column; earlier predictions have no value in it."""
    comment = "why there is no limit: short names, separated by commas; null with a limit"
    op.add_column("predictions", sa.Column("reason_codes", sa.String(200), comment=comment))
