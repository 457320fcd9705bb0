"""A worker: what it may do, the tools it does it with, and the loop that carries it."""
