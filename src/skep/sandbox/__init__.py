"""Run commands in a private computer: one contract, one file per mechanism."""
