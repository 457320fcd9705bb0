"""Read config.json and the environment once, and hand out frozen settings."""

from skep.config.environment import Environment
from skep.config.file import load
from skep.config.paths import Paths
from skep.config.settings import Settings
from skep.config.watch import Change, ConfigWatch

__all__ = ["Change", "ConfigWatch", "Environment", "Paths", "Settings", "load"]
