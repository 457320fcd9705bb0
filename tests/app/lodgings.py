"""What lies below the sessions of a program."""

from __future__ import annotations

from skep.app.apiary import Apiary
from skep.app.lodgings import Lodgings
from skep.sessions.sessions import Sessions


def apiary_of(sessions: Sessions) -> Apiary:
    """Return all workspaces of the machine that these sessions have their computers from."""
    assert isinstance(sessions.computers, Lodgings)
    return sessions.computers.apiary
