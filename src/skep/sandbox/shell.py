"""A shell that lasts: its folder, variables, functions and options survive from one command to the next.

There is no resident shell to wedge or to deceive. Each command runs in a bash of its own that first takes up the
state the last one left and saves its own at the end; how it ended is told by the kernel. So `exit`, `set -e`, a
syntax error or a killed command end that command and nothing else, and a program that prints a prompt or an end
marker has only printed it.

What does not carry over: open descriptors (`exec 3<file`), the job table (a background process itself goes on),
positional parameters, the stack of `pushd`, `ulimit` and traps (one on EXIT runs at the end of its command). A command
that was killed, that became another program (`exec`) or that called `exit` under an EXIT trap of its own saves nothing:
the state before it still holds. `exit` in the middle of a function makes the function's local variables global ones.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from skep.sandbox.mark import KEY

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Execution, Sandbox, User

_FOLDER = ".skep-shells"

# Takes up the state, and arranges for it to be saved. The names left out are those that bash sets itself. Tracing is
# kept out of the options and put before the next command, so that what is traced is the command alone.
_PRELUDE = r"""
__skep_file=$2 __skep_command=$3
builtin set --
__skep_save() {
    builtin local __skep_status=$? __skep_flags=$-
    __skep_options=$(builtin set +o; builtin shopt -p)
    builtin set +xveu +o pipefail
    builtin shopt -u nocasematch
    builtin local -a __skep_all __skep_names
    builtin local __skep_name
    builtin mapfile -t __skep_all < <(builtin compgen -v)
    for __skep_name in "${__skep_all[@]}"; do
        case $__skep_name in
            __skep_*|BASH|BASH_*|BASHOPTS|BASHPID|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO) ;;
            OPTIND|PIPESTATUS|PPID|PWD|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_) ;;
            SKEP_IDEMPOTENCY_KEY) ;;
            *) __skep_names+=("$__skep_name") ;;
        esac
    done
    {
        # The folder goes first, for its change sets OLDPWD; bash's own idea of it, for PWD is anybody's to set.
        builtin printf 'builtin cd -- %q\nbuiltin unset OLDPWD\n' "$(builtin pwd)"
        builtin declare -p "${__skep_names[@]}"
        builtin unset -f __skep_save
        builtin declare -f
        builtin declare -F
        builtin alias -p
        builtin umask -p
        builtin printf '%s\n' "$__skep_options" 'builtin set +xve' '__skep_first='
        case $__skep_flags in *x*) builtin printf '__skep_first="set -x;"\n' ;; esac
        # What the next command sees as $?; under `set -e` a failure here would end it.
        case $__skep_flags in
            *e*) builtin printf 'builtin set -e\n' ;;
            *) builtin printf 'builtin return %d\n' "$__skep_status" ;;
        esac
    } >| "$__skep_file.new" && /bin/mv -f "$__skep_file.new" "$__skep_file"
    builtin return "$__skep_status"
}
builtin trap '{ __skep_save; } 2>/dev/null' EXIT
if [[ -r $__skep_file ]]; then
    builtin unset $(builtin compgen -e -X SKEP_IDEMPOTENCY_KEY)
    builtin source "$__skep_file" &>/dev/null
fi
"""
# On one line, so that errors count lines from the command's own first. Saved at the end as well as by the trap, which
# the command may have replaced with one of its own.
_SCRIPT = 'builtin eval "$1"; builtin eval -- "$__skep_first$__skep_command"; { __skep_save; } 2>/dev/null'


class Shell:
    """One lasting shell of a sandbox. Commands given at once run one after the other."""

    def __init__(self, sandbox: Sandbox, user: User) -> None:
        self.id = secrets.token_hex(6)
        self._sandbox = sandbox
        self._user: User = user
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, sandbox: Sandbox, *, user: User = "agent") -> Shell:
        shell = cls(sandbox, user)
        await sandbox.files.mkdir(f"{sandbox.cache}/{_FOLDER}")
        return shell

    async def run(
        self,
        command: str,
        *,
        input: bytes = b"",
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> Execution:
        """Run a command where the last one left off. `key` is its own SKEP_IDEMPOTENCY_KEY, which does not last."""
        env = None if key is None else {KEY: key}
        async with self._turn:
            return await self._sandbox.run(
                self.argv(command), input=input, env=env, user=self._user, timeout_s=timeout_s
            )

    def argv(self, command: str) -> list[str]:
        """Return what to start for a caller that carries the output itself, one command at a time."""
        return ["/bin/bash", "--norc", "--noprofile", "-c", _SCRIPT, "shell", _PRELUDE, self._state, command]

    async def close(self) -> None:
        """Forget the shell's state."""
        from skep.errors import NotFound

        try:
            await self._sandbox.files.remove(self._state)
        except NotFound:
            return

    @property
    def _state(self) -> str:
        return f"{self._sandbox.cache}/{_FOLDER}/{self.id}"


async def lay_profile(sandbox: Sandbox, *, user: User, prompt: str, stay: bool) -> str:
    """Return a file inside that a bash at a terminal reads when it starts (`--rcfile`), to go on where the last was.

    It saves its state before each prompt, so that one whose terminal is lost leaves it too. With `stay` it does not go
    to the last one's folder.
    """
    file = f"{sandbox.cache}/{_FOLDER}/terminal-{user}"
    await sandbox.files.mkdir(f"{sandbox.cache}/{_FOLDER}")
    await sandbox.files.write(f"{file}.rc", _PROFILE.format(file=file, prelude=_PRELUDE, prompt=prompt, stay=int(stay)))
    return f"{file}.rc"


# What is of this terminal is not taken from the last one. Saved in a shell of its own: saving ends with less than there
# was before.
_PROFILE = r"""
builtin set -- '' '{file}' ''
__skep_term=$TERM __skep_here=$PWD
{prelude}
TERM=$__skep_term
(({stay})) && builtin cd -- "$__skep_here"
builtin unset __skep_term __skep_here __skep_command
PS1='{prompt}'
PROMPT_COMMAND='( __skep_save ) 2>/dev/null'
"""
