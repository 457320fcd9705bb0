"""Alembic's scripts, shipped with the package and run by `skep.state.revision.upgrade`."""
