"""Alembic's migrations of the service's database; ``python -m service.observations.migrate`` runs
them."""
