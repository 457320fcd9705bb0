"""Look whether packages for JavaScript can be found as Node would find them, without starting Node."""

from __future__ import annotations

import json
from collections.abc import Iterable
from posixpath import normpath
from typing import Any

from skep.errors import InvalidRequest
from skep.workspace.packages.view import View
from skep.workspace.template.semver import Range

_ENDINGS = ("", ".js", ".json", ".node", ".mjs", ".cjs", "/index.js", "/index.json", "/index.node")


def lacking(view: View, names: Iterable[str], *, deep: bool) -> dict[str, str]:
    """Return the packages that cannot be resolved, and what is wrong with each.

    `deep` opens each of them, and those that they need; otherwise it is enough that there is a folder.
    """
    there = set(view.names("node_modules"))
    if not there:
        return dict.fromkeys(names, "is not installed: node_modules is gone")
    for scope in [name for name in there if name.startswith("@")]:
        there |= {f"{scope}/{name}" for name in view.names(f"node_modules/{scope}")}
    missing = {name: "is not installed" for name in names if name not in there}
    return {**missing, **_deep(view, [name for name in names if name in there], there)} if deep else missing


def _deep(view: View, names: list[str], there: set[str]) -> dict[str, str]:
    troubles: dict[str, str] = {}
    waiting, seen = list(names), set(names)
    while waiting:
        name = waiting.pop()
        manifest, trouble = _opened(view, name)
        if trouble is not None:
            troubles[name] = trouble
        for other in manifest.get("dependencies", {}) if isinstance(manifest.get("dependencies"), dict) else ():
            if other in there and other not in seen:
                seen.add(other)
                waiting.append(other)
            elif other not in there and view.find(f"node_modules/{name}/node_modules/{other}") is None:
                troubles.setdefault(str(other)[:100], f"is not installed, and {name} needs it")
    return troubles


def at_odds(wanted: dict[str, str], have: dict[str, str]) -> dict[str, str]:
    """Return the packages whose version is not in the range that is declared."""
    return {
        name: f"is {have[name]}, and {wish} is declared"
        for name, wish in wanted.items()
        if name in have and not _fits(wish, have[name])
    }


def _opened(view: View, name: str) -> tuple[dict[str, Any], str | None]:
    """Return what the package.json of a package says, and what is wrong with the package."""
    folder = f"node_modules/{name}"
    text = view.read(f"{folder}/package.json")
    if text is None:
        return {}, "is not installed: its package.json is missing"
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        return {}, "has a package.json that cannot be read"
    return manifest, None if _resolves(view, folder, manifest) else "lacks the file that it begins with"


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
