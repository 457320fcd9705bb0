"""Every error Skep raises, grouped by who must act.

    SkepError
      InvalidRequest      the caller must change the request            400  exit 2
        ConfigInvalid     a field of config.json is wrong
        NotFound          there is nothing by that name                 404
        Conflict          the name or the state is already taken        409
          WorkspaceBusy   something runs in it that the act would break
          ThreadBusy      the thread has a task that is not done
        TemplateInvalid   a field of a template is wrong
        PackageRefused    a package cannot be had, or not together with the others
        ModelMissing      no model is configured that could answer
        ScriptInvalid     a field of a rehearsal's script is wrong
      Denied              policy or identity refused it                 403  exit 3
        SandboxDisabled   the hive has its sandbox switched off
      LimitReached        a budget, quota or rate ran out               429  exit 4
        StorageFull       the disk or the quota has no room left
      Unavailable         something Skep depends on is down             503  exit 5   may be retried
        DatabaseBusy      another process holds the database
        LeaseLost         another holder has taken the lease over
        SandboxLost       the sandbox died under the call
        SandboxUnusable   this machine cannot start a sandbox as asked
        StoreUnavailable  the store of archives cannot be reached
        ModelUnavailable  no model could be had to answer
      Corrupt             stored state breaks its own rules             500  exit 6   stop, keep the evidence
        ForeignDatabase   the database belongs to another program
        DatabaseTooNew    the database was written by a newer Skep
        ChainBroken       the event log does not match its hashes
        WorkspaceDamaged  a workspace or a snapshot lacks a part of itself
        ArchiveDamaged    an archive is cut, altered or not ours
        ArchiveTooNew     an archive was written by a newer Skep
      Defect              Skep's own bug                                500  exit 70

A message names what was wrong; the hint says what to do next.
"""

from __future__ import annotations


class SkepError(Exception):
    """Base of every error that Skep raises on purpose."""

    status = 500
    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidRequest(SkepError):
    """The caller must change the request."""

    status = 400
    exit_code = 2


class ConfigInvalid(InvalidRequest):
    """A field of config.json is wrong."""


class NotFound(InvalidRequest):
    """There is nothing by that name."""

    status = 404


class Conflict(InvalidRequest):
    """The name or the state is already taken."""

    status = 409


class WorkspaceBusy(Conflict):
    """Something runs in the workspace that the act would break."""


class ThreadBusy(Conflict):
    """The thread has a task that is not done, and the hive takes one at a time."""


class TemplateInvalid(InvalidRequest):
    """A field of a template is wrong."""


class PackageRefused(InvalidRequest):
    """A package cannot be had, or not together with the others."""


class ModelMissing(InvalidRequest):
    """No model is configured that could answer."""


class ScriptInvalid(InvalidRequest):
    """A field of a rehearsal's script is wrong."""


class Denied(SkepError):
    """Policy or identity refused it."""

    status = 403
    exit_code = 3


class SandboxDisabled(Denied):
    """The hive has its sandbox switched off."""


class LimitReached(SkepError):
    """A budget, quota or rate ran out."""

    status = 429
    exit_code = 4


class StorageFull(LimitReached):
    """The disk or the quota has no room left."""


class Unavailable(SkepError):
    """Something Skep depends on is down; the call may be retried."""

    status = 503
    exit_code = 5


class DatabaseBusy(Unavailable):
    """Another process holds the database."""


class LeaseLost(Unavailable):
    """Another holder has taken the lease over."""


class SandboxLost(Unavailable):
    """The sandbox died under the call."""


class SandboxUnusable(Unavailable):
    """This machine cannot start a sandbox as asked."""


class StoreUnavailable(Unavailable):
    """The store of archives cannot be reached."""


class ModelUnavailable(Unavailable):
    """No model could be had to answer."""


class Corrupt(SkepError):
    """Stored state breaks its own rules: stop, and keep the evidence."""

    status = 500
    exit_code = 6


class ForeignDatabase(Corrupt):
    """The database belongs to another program."""


class DatabaseTooNew(Corrupt):
    """The database was written by a newer Skep."""


class ChainBroken(Corrupt):
    """The event log does not match its hashes."""


class WorkspaceDamaged(Corrupt):
    """A workspace or a snapshot lacks a part of itself."""


class ArchiveDamaged(Corrupt):
    """An archive is cut, altered or not ours."""


class ArchiveTooNew(Corrupt):
    """An archive was written by a newer Skep."""


class Defect(SkepError):
    """Skep's own bug."""
