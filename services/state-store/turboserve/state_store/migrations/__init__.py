"""Alembic's scripts, shipped with the package and run at start."""
