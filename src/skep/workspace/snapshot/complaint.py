"""What uv and npm say when they fail, turned into one error that names the package."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skep.errors import LimitReached, PackageRefused, SkepError, StorageFull, Unavailable
from skep.sandbox.sandbox import Execution

_FULL = re.compile(r"No space left on device|os error 28|ENOSPC|Disk quota exceeded|os error 122|EDQUOT")
_AWAY = re.compile(
    r"Request failed after|error sending request|dns error|tcp connect error|operation timed out"
    r"|npm error code (?:E5\d\d|ECONN\w+|ENOTFOUND|EAI_AGAIN|ETIMEDOUT|ERR_SOCKET\w*|EPIPE|FETCH_ERROR|CERT_\w+)"
)
_BARRED = re.compile(
    r"Skep blocked this request: ([^\n]+?)(?: Allowed are|\n|$)|(?:status client error \(|code E)(40[13])"
)
#: What uv and npm print for each kind of failure, with the package's name, and what it means.
_Kinds = tuple[tuple[re.Pattern[str], str], ...]
_BUILDS: _Kinds = (
    (re.compile(r"Failed to build `(?P<name>[^`]+)`"), "{name} cannot be built"),
    (re.compile(r"npm error path \S*?/node_modules/(?P<name>\S+)\nnpm error command failed"), "{name} cannot be built"),
)
_KINDS: _Kinds = (
    (re.compile(r"[Bb]ecause (?P<name>\S+) was not found in the package registry"), "there is no package {name}"),
    (re.compile(r"The requested resource '(?P<name>@?[^@']+)@[^']*' could not be found"), "there is no package {name}"),
    (re.compile(r"'(?P<name>@?[^@']+)@[^']*' is not in this registry"), "there is no package {name}"),
    (re.compile(r"(?P<name>\S+) has no versions?\b"), "there is no version of {name}"),
    (re.compile(r"[Bb]ecause (?:only|there (?:are no versions|is no version) of) (?P<name>[A-Za-z0-9._-]+)[^,]*?"
                r" and you require (?P<asked>[^\n]+?), we"), "there is no version of {name} that fits {asked}"),
    (re.compile(r"No matching version found for (?P<name>@?[^@\s]+)@(?P<asked>\S+?)\.?\n"),
     "there is no version of {name} that fits {asked}"),
    (re.compile(r"Hash mismatch for `(?P<name>[^`]+)`"), "{name} is not what the index announced"),
    (re.compile(r"EINTEGRITY[\s\S]*?/(?P<name>(?:@[^/\s]+/)?[^/\s]+)/-/"), "{name} is not what the registry announced"),
    (re.compile(r"Failed to (?:download|fetch|extract|unpack|read)[^`\n]*`(?P<name>[^`]+)`"), "{name} cannot be had"),
)  # fmt: skip
_SHORT = 400


def explain(ended: Execution, declared: Sequence[str], *, doing: str) -> SkepError:
    """Say why an installer failed, naming the package if it is one package's fault."""
    text = ended.text + "\n" + ended.error_text + "\n"
    if ended.limit == "disk" or _FULL.search(text):
        return StorageFull(f"there was no room left while {doing}", hint="free space, or raise the template's disk_mb")
    if ended.limit is not None and ended.limit != "output":
        return LimitReached(f"{doing} met the limit on {ended.limit}", hint="raise the limits of builds")
    # What a package's own build prints may look like anything else that is told apart below.
    if fault := _fault(text, _BUILDS):
        return fault
    if barred := _BARRED.search(text):
        reason = barred[1] or f"the index answers {barred[2]}"
        return Unavailable(f"the package index refused {doing}: {reason}", hint="check the `packages` settings")
    if _AWAY.search(text):
        return Unavailable(
            f"the package index does not answer: {_cause(text)}", hint="check the network and the `packages` settings"
        )
    return _fault(text, _KINDS) or _conflict(text, declared, doing)


def _fault(text: str, kinds: _Kinds) -> PackageRefused | None:
    for pattern, meaning in kinds:
        if found := pattern.search(text):
            told = meaning.format(**found.groupdict())
            return PackageRefused(f"{told}: {_cause(text)}", hint="change the template, or the version it asks for")
    return None


def _conflict(text: str, declared: Sequence[str], doing: str) -> SkepError:
    named = [name for name in declared if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
    if "No solution found" in text or "ERESOLVE" in text:
        who = " and ".join(named) if named else "the packages"
        return PackageRefused(f"{who} cannot be had together: {_cause(text)}", hint="ask for other versions of them")
    return PackageRefused(f"{doing} failed: {_cause(text)}", hint="the log tells more")


def _cause(text: str) -> str:
    """Pick the sentences that tell a person most."""
    lines = [line.rstrip() for line in text.splitlines()]
    for pick in (_uv_cause, _npm_cause):
        if found := pick(lines):
            return _short(found)
    return _short(next((line.strip() for line in reversed(lines) if line.strip()), "it gave no reason"))


def _uv_cause(lines: list[str]) -> str:
    causes = [index for index, line in enumerate(lines) if line.strip().startswith("cause:")]
    if not causes:
        return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    end = next((index for index in range(causes[-1], len(lines)) if lines[index].startswith("hint:")), len(lines))
    told = [line.strip() for line in lines[causes[-1] : end] if line.strip()]
    if "[stderr]" in told:  # the last thing that the package's own build said
        return told[-1]
    return " ".join(told).removeprefix("cause: ")


def _npm_cause(lines: list[str]) -> str:
    errors = [line.removeprefix("npm error ").strip() for line in lines if line.startswith("npm error ")]
    told = [line for line in errors if not line.startswith(("code ", "A complete log", "For a full report", "path "))]
    if any(line.startswith("command ") for line in told):
        return told[-1]
    useful = [line for line in told if not line.endswith(("404", "npm error"))]
    return " ".join(useful[:6])


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _SHORT else plain[: _SHORT - 1] + "…"
