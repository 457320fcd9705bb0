"""Journeys through a server; a folder that is a package lets go of its servers with its last test."""
