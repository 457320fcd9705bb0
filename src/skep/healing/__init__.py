"""Healing: name a failure, and decide what is done about it. Nothing here acts."""
