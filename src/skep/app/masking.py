"""Keep secrets, and the bodies of memories and skills, out of everything that is logged."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from skep.config.secrets import MASK, is_secret_name, mask_text

_DEEPEST = 16

# Compared in lower case without separators: memory_md, memoryMd and MEMORY.md are one name.
_BODY_NAMES = frozenset(
    {"memory", "memorymd", "memorybody", "memorytext", "projection", "scratchpad", "trajectory"}
    | {"skill", "skillmd", "skillbody", "skilltext", "skillsource", "frontmatter"}
)
_CONTENT_NAMES = frozenset({"body", "content", "contents", "text", "data", "source", "markdown", "diff", "patch"})
# A record that names one of these files is about its content.
_BODY_PATHS = re.compile(r"(?:^|/)(?:MEMORY\.md|SKILL\.md|memory/[^/]+\.md|skills/.+)$")
_LONGEST = 16_384


@dataclass(frozen=True, slots=True)
class Masking:
    """A structlog processor; `known` are values to blot out wherever they occur."""

    known: tuple[str, ...] = ()

    def __call__(self, logger: Any, method: str, event_dict: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return self.mapping(event_dict, 0)

    def text(self, text: str) -> str:
        """Blot out what must not be seen, and cut what is too long to be a log line."""
        if _is_skill(text):
            return withheld(text)
        if len(text) <= _LONGEST:
            return mask_text(text, self.known)
        # The cut may fall inside a secret and spoil its shape, so the word it falls into goes as well.
        head = text[:_LONGEST]
        head = head[: max(head.rfind(" "), head.rfind("\n"), _LONGEST - 512)]
        return f"{mask_text(head, self.known)} [cut, {len(text)} characters]"

    def mapping(self, fields: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        about_a_body = any(isinstance(value, str) and _BODY_PATHS.search(value) for value in fields.values())
        return {
            self.text(str(name)): self._field(str(name), value, depth, about_a_body=about_a_body)
            for name, value in fields.items()
        }

    def _field(self, name: str, value: Any, depth: int, *, about_a_body: bool) -> Any:
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        if value is None or isinstance(value, bool):
            return value
        if plain in _BODY_NAMES or (about_a_body and plain in _CONTENT_NAMES):
            return self._body(value, depth)
        if is_secret_name(name) and not isinstance(value, Mapping):
            return MASK
        return self._value(value, depth + 1)

    def _body(self, value: Any, depth: int) -> Any:
        if isinstance(value, int | float):
            return value
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._body(inner, depth + 1) for name, inner in value.items()}
        return withheld(value if isinstance(value, str | bytes) else str(value))

    def _value(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return self.text(value)
        if depth >= _DEEPEST:
            return "[too deep]"
        if isinstance(value, Mapping):
            return self.mapping(value, depth)
        if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
            return [self._value(item, depth + 1) for item in value]
        return self.text(_spelled(value))


def withheld(body: str | bytes) -> str:
    """Stand in for a body that is nobody's business in a log."""
    return f"[withheld, {len(body)} {'bytes' if isinstance(body, bytes) else 'characters'}]"


def _is_skill(text: str) -> bool:
    """Tell the text of a SKILL.md by its front matter."""
    head = text[:2000].lstrip()
    return head.startswith("---\n") and "\nname:" in head and "\ndescription:" in head


def _spelled(value: object) -> str:
    """Spell any object; bytes as text, so that a secret in them keeps its shape."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value) if isinstance(value, BaseException) else repr(value)
