"""Snapshots: templates built once, kept in versions, over a shared cache of packages."""
