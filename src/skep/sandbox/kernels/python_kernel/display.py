"""What a value looks like: the formats it offers, by the protocol that notebooks use."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from typing import Any

from . import bounds
from .tables import table

_METHODS = {
    "html": "_repr_html_",
    "markdown": "_repr_markdown_",
    "svg": "_repr_svg_",
    "png": "_repr_png_",
    "jpeg": "_repr_jpeg_",
    "json": "_repr_json_",
    "latex": "_repr_latex_",
}
_TYPES = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/json": "json",
    "text/latex": "latex",
}
#: Types whose text says it all; asking them for anything else only takes time.
_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None), type, range, set, tuple, frozenset))

Publish = Callable[[dict[str, Any]], None]


def describe(value: Any) -> dict[str, Any]:
    """Return the formats of a value, each within its bound, with notes on what was cut or failed."""
    notes: list[str] = []
    found: dict[str, Any] = {}
    if type(value) in (dict, list):
        found["json"] = value
    elif type(value) not in _PLAIN and not isinstance(value, type):
        found = _offered(value, notes)
    if "text" not in found:
        found["text"] = _attempt("repr", lambda: repr(value), notes) or f"<{type(value).__name__}>"
    return {**_bounded(found, notes), "notes": notes}


def describe_bundle(bundle: dict[str, Any]) -> dict[str, Any]:
    """Return what a dictionary of media types holds, as `display(…, raw=True)` gets it."""
    notes: list[str] = []
    return {**_bounded({_TYPES[kind]: data for kind, data in bundle.items() if kind in _TYPES}, notes), "notes": notes}


def _offered(value: Any, notes: list[str]) -> dict[str, Any]:
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure):
        from .figures import describe_figure

        return describe_figure(value, notes)
    found: dict[str, Any] = {}
    # On the type: objects that answer to any attribute would otherwise claim every format.
    if hasattr(type(value), "_repr_mimebundle_"):
        bundle = _attempt("_repr_mimebundle_", value._repr_mimebundle_, notes)
        bundle = bundle[0] if isinstance(bundle, tuple) else bundle
        found = {_TYPES[kind]: data for kind, data in (bundle or {}).items() if kind in _TYPES}
    for name, method in _METHODS.items():
        if name not in found and hasattr(type(value), method) and not (name == "jpeg" and "png" in found):
            data = _attempt(method, getattr(value, method), notes)
            if data is not None:
                found[name] = data[0] if isinstance(data, tuple) else data
    data = _attempt("data", lambda: table(value, notes), notes)
    return found if data is None else {**found, "data": data}


def _attempt(what: str, work: Callable[[], Any], notes: list[str]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001  the value's own code: whatever it raises, the value is still shown
        notes.append(f"{what} failed: {type(error).__name__}: {str(error)[:500]}")
        return None


def _bounded(found: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, data in found.items():
        if name == "text":
            kept[name] = bounds.cut_text(str(data), notes)
        elif name in ("data", "charts"):
            kept[name] = data
        elif name in ("png", "jpeg"):
            _keep_picture(kept, name, data, notes)
        elif name == "json":
            _keep_json(kept, data, notes)
        elif len(str(data)) > bounds.FORMAT_BYTES:
            notes.append(f"{name}: left out, {len(str(data)):,} characters are too many")
        else:
            kept[name] = str(data)
    return kept


def _keep_picture(kept: dict[str, Any], name: str, data: Any, notes: list[str]) -> None:
    encoded = base64.b64encode(data).decode() if isinstance(data, (bytes, bytearray)) else "".join(str(data).split())
    if len(encoded) * 3 // 4 > bounds.PICTURE_BYTES:
        notes.append(f"{name}: left out, {len(encoded) * 3 // 4:,} bytes are too many")
    else:
        kept[name] = encoded


def _keep_json(kept: dict[str, Any], data: Any, notes: list[str]) -> None:
    try:
        encoded = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return  # not everything in it is JSON; the text shows it
    if len(encoded) > bounds.FORMAT_BYTES:
        notes.append(f"json: left out, {len(encoded):,} bytes are too many")
    elif encoded.count("[") + encoded.count("{") > bounds.JSON_DEPTH and not _shallow(data, bounds.JSON_DEPTH):
        notes.append(f"json: left out, it is more than {bounds.JSON_DEPTH} levels deep")
    else:
        kept["json"] = data


def _shallow(data: Any, levels: int) -> bool:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else ()
    return levels > 0 and all(_shallow(one, levels - 1) for one in inner)
