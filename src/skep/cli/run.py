"""Run one command and turn whatever it raises into a message and an exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from typer import Abort, Context

from skep.cli.app import app
from skep.cli.desk import debugging
from skep.cli.terminal import INTERRUPTED, printable
from skep.errors import Defect, InvalidRequest, SkepError, StorageFull


@runtime_checkable
class _Misuse(Protocol):
    """What typer raises for a wrong command line; it keeps the class itself private."""

    ctx: Context | None

    def format_message(self) -> str: ...


def run(arguments: Sequence[str]) -> int:
    """Run the command line with these arguments; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows only ASCII gets escapes, not an error
            stream.reconfigure(errors="backslashreplace")
    # What stands after -- belongs to another program.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours, theirs = arguments[:end], arguments[end:]
    debug = "--debug" in ours
    as_json = "--json" in ours
    debugging.set(debug)
    words = [*(word for word in ours if word != "--debug"), *theirs] or ["--help"]
    try:
        code = app(args=words, prog_name="skep", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_is_gone()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):
            return _reader_is_gone()
        raise
    except Exception as error:  # noqa: BLE001  the outermost boundary: nothing may reach the user as a traceback
        return _report(error, as_json=as_json, debug=debug)
    return code if isinstance(code, int) else 0


def _reader_is_gone() -> int:
    """Let `skep … | head` end in peace: what is still in the buffer goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _report(error: Exception, *, as_json: bool, debug: bool) -> int:
    from skep.config.environment import Environment
    from skep.config.secrets import mask_text

    secrets = Environment.read().secrets
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help text
        sys.stdout.write(str(error) + "\n")
        return InvalidRequest.exit_code
    known = _as_skep_error(error)
    message, hint = mask_text(known.message, secrets), mask_text(known.hint or "", secrets)
    if debug:
        sys.stderr.write(mask_text("".join(traceback.format_exception(error)), secrets))
    if as_json:
        body = {
            "type": type(known).__name__,
            "message": message,
            "hint": hint or None,
            "exit_code": known.exit_code,
        }
        sys.stderr.write(json.dumps({"error": body}) + "\n")
    else:
        sys.stderr.write(_paint("error:", "1;31") + f" {printable(message)}\n")
        if hint:
            sys.stderr.write(_paint("  try:", "1;36") + f" {printable(hint)}\n")
    return known.exit_code


def _as_skep_error(error: Exception) -> SkepError:
    if isinstance(error, SkepError):
        return error
    if isinstance(error, _Misuse):
        command = error.ctx.command_path if error.ctx else "skep"
        return InvalidRequest(error.format_message().rstrip("."), hint=f"{command} --help")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StorageFull("there is no room left to write to", hint="free some space and try again")
    return Defect(
        f"Skep failed in a way it should not: {type(error).__name__}: {error}",
        hint="run it again with --debug and report what it prints",
    )


def _paint(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m" if sys.stderr.isatty() else text
