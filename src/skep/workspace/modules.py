"""Look whether packages for JavaScript can be found as Node would find them, without starting Node."""

from __future__ import annotations

import json
from collections.abc import Iterable
from posixpath import normpath
from typing import Any

from skep.errors import InvalidRequest
from skep.workspace.semver import Range
from skep.workspace.view import View

_ENDINGS = ("", ".js", ".json", ".node", ".mjs", ".cjs", "/index.js", "/index.json", "/index.node")


def lacking(view: View, names: Iterable[str]) -> dict[str, str]:
    """Return the packages that cannot be resolved, and what is wrong with each."""
    there = view.names("node_modules")
    if not there:
        return dict.fromkeys(names, "is not installed: node_modules is gone")
    scoped = {name for scope in there if scope.startswith("@") for name in view.names(f"node_modules/{scope}")}
    found = {name: _trouble(view, name) for name in names if name.rpartition("/")[2] in {*there, *scoped}}
    missing = {name: "is not installed" for name in names if name not in found}
    return {**missing, **{name: trouble for name, trouble in found.items() if trouble is not None}}


def at_odds(wanted: dict[str, str], have: dict[str, str]) -> dict[str, str]:
    """Return the packages whose version is not in the range that is declared."""
    return {
        name: f"is {have[name]}, and {wish} is declared"
        for name, wish in wanted.items()
        if name in have and not _fits(wish, have[name])
    }


def _trouble(view: View, name: str) -> str | None:
    folder = f"node_modules/{name}"
    text = view.read(f"{folder}/package.json")
    if text is None:
        return "is not installed: its package.json is missing"
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        return "has a package.json that cannot be read"
    return None if _resolves(view, folder, manifest) else "lacks the file that it begins with"


def _resolves(view: View, folder: str, manifest: dict[str, Any]) -> bool:
    main = manifest.get("main", "")
    if "exports" in manifest:
        # Too many ways to say it: the first file that is named has to serve.
        main = _first_file(manifest["exports"]) or main
    if not isinstance(main, str) or "*" in main:
        return True
    path = normpath(f"{folder}/{main}")
    if not path.startswith(folder):
        return True
    candidates = [path + ending for ending in _ENDINGS]
    if not main or path == folder:
        # A package of types alone begins with nothing that runs.
        return "types" in manifest or "typings" in manifest or "bin" in manifest or _any(view, candidates)
    return _any(view, [*candidates, f"{folder}/index.js"])


def _any(view: View, paths: Iterable[str]) -> bool:
    return any((found := view.find(path)) is not None and found.kind in ("file", "link") for path in paths)


def _first_file(exports: object) -> str | None:
    for _ in range(10):
        if isinstance(exports, str):
            return exports
        if not isinstance(exports, dict) or not exports:
            return None
        exports = exports.get(".", next(iter(exports.values())))
    return None


def _fits(wanted: str, version: str) -> bool:
    try:
        return Range.parse(wanted).contains(version)
    except InvalidRequest:  # a tag, or something else that says nothing about versions
        return True
