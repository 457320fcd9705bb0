"""Give a failure its name, in one place for errors and one for what tools report."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Sequence

from skep.errors import Denied, LimitReached, ModelUnavailable, SandboxDisabled, SandboxLost, SkepError
from skep.healing.failure import KINDS, Check, Failure, FailureKind
from skep.models.failures import ModelFailure

#: Errors by the failure that they are, the more special ones first.
_NAMES: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (SandboxLost, "sandbox_lost"),
    (SandboxDisabled, "sandbox_disabled"),
    (Denied, "denied"),
    (LimitReached, "limit"),
    (ModelUnavailable, "overloaded"),
    (TimeoutError, "timeout"),
    (CancelledError, "cancelled"),
)


def name(error: BaseException) -> Failure:
    """Name what an error means for the attempt that it ended."""
    if isinstance(error, ModelFailure):
        return _of_model(error)
    kind: FailureKind = next((kind for one, kind in _NAMES if isinstance(error, one)), "unknown")
    if isinstance(error, SkepError):
        return Failure(kind, error.message, hint=error.hint)
    return Failure(kind, f"{type(error).__name__}: {error}")


def _of_model(error: ModelFailure) -> Failure:
    check = Check("schema of the answer", False, error.message) if error.kind == "invalid_output" else None
    return Failure(
        error.kind,
        error.message,
        provider=error.provider,
        retry_after_s=error.retry_after_s,
        check=check,
        hint=error.hint,
    )


def of_trouble(
    failure: str,
    message: str,
    tool: str,
    *,
    packages: Sequence[str] = (),
    ecosystem: str = "python",
    fallback: str | None = None,
    check: Check | None = None,
) -> Failure:
    """Name what a tool reports about itself; a name that is not known is a failure of the tool."""
    kind: FailureKind = failure if failure in KINDS else "tool_error"
    wanted = tuple(packages)
    return Failure(kind, message, tool=tool, packages=wanted, ecosystem=ecosystem, fallback=fallback, check=check)
