"""Clouds that are played on this machine, each speaking its own wire protocol to its unmodified SDK."""
