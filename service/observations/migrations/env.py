"""The script that Alembic runs for every migration, in one transaction.

Alembic runs this file outside its package, so :mod:`service.observations.migrate` passes the
connection and the schema.
"""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes["metadata"],
    version_table=context.config.attributes["version_table"],
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
