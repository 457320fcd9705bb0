"""A new template, with comments that say what can be changed."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkstemp
from textwrap import indent
from typing import TYPE_CHECKING

from skep.errors import Conflict, InvalidRequest

if TYPE_CHECKING:
    from skep.workspace.template.template import Template

_DRAFT = """\
# A template of Skep: what workspaces start from. Check it with: skep template check {name}
version: 1
name: {name}
description: Say in a line what it is for.

# Another template, to which this one adds.
{extends}

# Python, in /workspace/.venv.
{python}

# Packages for JavaScript, in /workspace/node_modules.
# nodejs:
#   version: ">=18"
#   runtime: node  # or bun
#   dependencies:
#   - axios@^1.7
#   - "@scope/name"  # a value that begins with @ or * needs quotes

system:
  # shell: bash  # or sh
  # editor: vim

security:
  # none: no network. packages: the package indexes alone. allowed: the domains listed below alone.
  {network}
  # allowed_domains:
  # - api.example.org
  # - "*.example.com"
  # Below /workspace: what may be read and not changed, and what in it may be changed all the same.
  # read_only_paths:
  # - /workspace/reference
  # writable_paths:
  # - /workspace/reference/notes

# What a sandbox may use; the settings decide what is not said.
resources:
  # cpus: 2
  # memory_mb: 4096
  # disk_mb: 5120
  # processes: 512
"""


_PYTHON = """\
python:
  # version: "3.12"  # or specifiers: ">=3.11"
  dependencies:
  # - requests
  # - pandas>=2.2"""


def draft(name: str, base: str | None) -> str:
    """Return the text of a template that does nothing of its own yet."""
    extends = f"extends: {base}" if base else "# extends: minimal"
    # What the base says goes on being so: a line here would take its place.
    network = "# network: none" if base else "network: none"
    python = indent(_PYTHON, "# ") if base else _PYTHON
    return _DRAFT.format(name=name, extends=extends, network=network, python=python)


def written(template: Template) -> str:
    """Return a template as YAML, without what it does not say."""
    import yaml

    values = template.model_dump(mode="json", exclude_none=True)
    kept = {
        name: {inner: one for inner, one in value.items() if one != []} if isinstance(value, dict) else value
        for name, value in values.items()
    }
    parts = {name: value for name, value in kept.items() if value or name in {"python", "nodejs"}}
    return yaml.safe_dump(parts, sort_keys=False, allow_unicode=True, width=100)


def write_new(file: Path, text: str) -> None:
    """Write a file as a whole or not at all, and never over another."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = mkstemp(prefix=".new-", dir=file.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fchmod(descriptor, 0o644)
                os.fsync(descriptor)
            os.link(name, file)
        finally:
            Path(name).unlink()
    except FileExistsError as error:
        raise Conflict(f"{file} is there already", hint=f"change that one: $EDITOR {file}") from error
    except (PermissionError, NotADirectoryError) as error:
        reason = (error.strerror or "").lower()
        raise InvalidRequest(f"{file} cannot be written: {reason}", hint=f"ls -ld {file.parent}") from error
