"""Names of files from outside: made safe to write, to deliver and to show."""

from __future__ import annotations

import re
import unicodedata

NAME_BYTES = 200
_SUFFIX_BYTES = 24
_SHOWN = 80
#: What Windows cannot have in a name, where many of the files end up.
_AWKWARD = re.compile(r'[<>:"|?*]')
_RESERVED = re.compile(r"(?i)(?:con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(?:\..*)?$")
#: Invisible ones that words of some scripts need.
_JOINERS = "\u200c\u200d"
#: Control, format, surrogate, private and unassigned characters; ends of lines and paragraphs.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def safe_name(name: str) -> str:
    """Return the name of a file that can be written in any folder, as close to the given one as is safe.

    It is one part of a path, prints on one line, is no option to a program and not hidden, and has at most 200 bytes.
    """
    last = re.split(r"[/\\]", unicodedata.normalize("NFC", name).rstrip("/\\"))[-1]
    visible = "".join(_visible(character) for character in last)
    clean = _AWKWARD.sub("_", " ".join(visible.split())).rstrip(". ").strip(_JOINERS)
    if not clean.strip("._ -"):
        return "file"
    if clean[0] in ".-~" or _RESERVED.match(clean):
        clean = f"_{clean}"
    return _cut(clean, NAME_BYTES)


def numbered(name: str, number: int | str) -> str:
    """Put a number before a name's suffix, so that it is another name."""
    stem, suffix = split_suffix(name)
    mark = f"-{number}"
    return _cut(stem, NAME_BYTES - len(mark.encode()) - len(suffix.encode())) + mark + suffix


def split_suffix(name: str) -> tuple[str, str]:
    """Split a name before its suffix; that of a packed archive has two parts."""
    found = re.search(r"(?:\.tar)?\.[^. ]+$", name)
    if not found or found.start() == 0 or len(found[0].encode()) > _SUFFIX_BYTES:
        return name, ""
    return name[: found.start()], found[0]


def shown(text: str, most: int = _SHOWN) -> str:
    """Return a text from outside in quotes, on one line, with all that does not print written as escapes."""
    cut = text[:most]
    printed = "".join(_escaped(character) for character in cut)
    return f'"{printed}{"…" if len(text) > most else ""}"'


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    if character in _JOINERS or unicodedata.category(character) not in _UNSEEN:
        return character
    return ""


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if unicodedata.category(character) not in _UNSEEN:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _cut(name: str, most: int) -> str:
    """Shorten a name to so many bytes, before its suffix and between characters."""
    if len(name.encode()) <= most:
        return name
    stem, suffix = split_suffix(name)
    kept = stem.encode()[: most - len(suffix.encode())].decode(errors="ignore")
    return kept.rstrip(" ." + _JOINERS) + suffix
