"""Containers of a Docker engine on this machine, and what a sandbox needs of them."""
