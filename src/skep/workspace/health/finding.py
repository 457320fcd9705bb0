"""What an examination of a workspace has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, how it is, and the command that puts it right if it is not well."""

    code: str
    severity: Severity
    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was looked at in one workspace."""

    workspace: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Nothing is broken; there may be warnings."""
        return all(finding.severity != "broken" for finding in self.findings)

    @property
    def troubles(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity != "ok")
