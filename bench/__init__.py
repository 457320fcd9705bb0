"""Benchmarks: how fast Skep is on this machine, beside the floors that the machine sets."""
