"""What Alembic runs for every migration: in one transaction, on the connection that :mod:`service.observations.migrate` gives."""

from alembic import context

from service.observations.schema import METADATA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
