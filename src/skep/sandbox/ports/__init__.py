"""Servers inside, reached from the host: never the other way round, and only with a token."""

from skep.sandbox.ports.exposure import Exposure
from skep.sandbox.ports.visit import Bounds

__all__ = ["Bounds", "Exposure"]
