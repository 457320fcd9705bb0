"""Packages on demand: tried beside a workspace, and put in their place when they fit."""
