"""Promises about the shell that lasts."""
# ruff: noqa: S108 - these are paths inside

from __future__ import annotations

import asyncio

import pytest

from skep.sandbox.sandbox import Sandbox
from skep.testing.promise import promise

#: What is done, then what the next command prints if it survived.
KEPT = {
    "folder": ("mkdir -p a/b; cd a/b", "pwd", "/workspace/a/b"),
    "folder above the workspace": ("cd /", "pwd", "/"),
    "folder whose variable was set by hand": ("cd /tmp; PWD=/nowhere", "pwd", "/tmp"),
    "the folder before": ("cd /tmp; cd /usr", "cd -", "/tmp"),
    "variable": ("x='a  b'", 'echo "$x"', "a  b"),
    "export": ("export MINE=1", "env | grep MINE", "MINE=1"),
    "variable with a new line and quotes": ("x=$'a\\nb\"c\\'d'", 'echo "$x"', "a\nb\"c'd"),
    "array": ("x=(1 '2 3' 4)", 'echo ${#x[@]} "${x[1]}"', "3 2 3"),
    "table": ("declare -A x=([k v]='w z')", 'echo "${x[k v]}"', "w z"),
    "integer": ("declare -i x=5", "x=2+2; echo $x", "4"),
    "read-only variable": ("readonly x=1", "echo $x; x=2", "1"),
    "unset variable": ("unset HOME", "echo ${HOME-none}", "none"),
    "unset PATH": ("unset PATH", "echo ${PATH-none}; /bin/true", "none"),
    "IFS": ("IFS=,; x=a,b", "printf '%s ' $x", "a b "),
    "function": ("f() { echo f:$1; }", "f x", "f:x"),
    "exported function": ("f() { echo inner; }; export -f f", "bash -c f", "inner"),
    "alias": ("shopt -s expand_aliases; alias hi='echo hello'", "hi you", "hello you"),
    "umask": ("umask 077", "umask", "0077"),
    "option": ("set -o noclobber -f; shopt -s nullglob", "echo *; shopt -q nullglob && echo on", "*\non"),
    "status": ("(exit 7)", "echo $?", "7"),
    "what a failing command did": ("x=1; cd /tmp; false", "echo $x; pwd", "1\n/tmp"),
    "what was done before exit": ("x=1; cd /tmp; exit 3", "echo $x; pwd", "1\n/tmp"),
    "what was done before a signal": ("x=1; kill $$", "echo $x", "1"),
    "state beside a trap of its own": ("trap 'echo bye' EXIT; x=1", "echo $x", "1"),
    "names that differ in case": ("shopt -s nocasematch; uid=5", "echo $uid", "5"),
}

#: What is tried; afterwards the shell must work as before.
HARMLESS = {
    "a syntax error": "if then fi (",
    "an unclosed quote": "echo 'never closed",
    "an unclosed here-document": "cat <<EOF\nnever closed",
    "an unclosed brace": "f() { echo",
    "exit": "exit 0",
    "exit in a function": "f() { exit 1; }; f",
    "exec of another program": "exec true",
    "killing itself": "kill -9 $$",
    "set -e and a failure": "set -e; false; echo not reached",
    "set -u and an unset variable": "set -u; echo $nothing_there; set +u",
    "set -n": "set -n",
    "set -t": "set -t; echo one; echo two",
    "set -o posix": "set -o posix; export ''",
    "a restricted shell": "set -r",
    "closing all streams": "exec <&- >&- 2>&-",
    "sending all output away": "exec >/dev/null 2>&1",
    "printing a prompt": "printf '$ \\n# \\nbash-5.2$ \\nagent@skep:~$ '",
    "printing what ends other shells' commands": "echo __END__ $?; echo '<<exit>>'; printf '\\x04\\x03\\x1a'",
    "escape sequences": "printf '\\e[2J\\e[6n\\e]0;title\\a'",
    "reading input": "cat; read -r x; read -r -t 5 y",
    "a function named builtin": "builtin() { return 1; }",
    "a function named as others": "declare() { :; }; trap() { :; }; printf() { :; }; source() { :; }; eval() { :; }",
    "a disabled builtin": "enable -n declare printf mapfile",
    "a read-only variable of the shell's own": "readonly PATH HOME; readonly -f",
    "traps": "trap 'exit 9' EXIT; trap '' TERM INT HUP; trap 'true' DEBUG ERR",
    "a background process": "sleep 1000 & disown",
    "a coprocess": "coproc cat",
    "return and break outside": "return 3; break 5",
    "a folder that is gone": "mkdir gone; cd gone; rmdir ../gone",
    "no command at all": "",
    "only a comment": "# nothing",
    "a command that looks like an option": "--help",
    "variables that change bash": "BASH_ENV=/nowhere TMOUT=1 POSIXLY_CORRECT=1 PS4='$(exit)' PROMPT_COMMAND=exit",
    "deep nesting": "eval " * 50 + "true",
    "a variable of its own name": "__skep_file=/etc/passwd; __skep_command=exit",
}


class ShellPromises:
    """A shell lasts from one command to the next, and nothing said to it can wedge or deceive it."""

    @pytest.mark.parametrize("name", KEPT)
    @promise
    async def test_keeps(self, sandbox: Sandbox, name: str) -> None:
        doing, asking, answer = KEPT[name]
        shell = await sandbox.shell()
        await shell.run(doing)
        asked = await shell.run(asking)
        assert asked.text.rstrip("\n") == answer, asked.error_text

    @pytest.mark.parametrize("name", HARMLESS)
    @promise
    async def test_survives(self, sandbox: Sandbox, name: str) -> None:
        shell = await sandbox.shell()
        await shell.run("kept=1; cd /tmp")
        await shell.run(HARMLESS[name], timeout_s=10)
        after = await shell.run("set +eu; echo works; /bin/false")
        assert (after.stdout, after.stderr, after.exit_code) == (b"works\n", b"", 1), after

    @pytest.mark.parametrize(
        "command",
        ["echo 'shell died' >&2; kill -9 $$", "sleep 1000", "exec sleep 1000"],
        ids=["killed", "late", "exec"],
    )
    @promise
    async def test_a_command_that_never_finished_leaves_the_state_before_it(
        self, sandbox: Sandbox, command: str
    ) -> None:
        shell = await sandbox.shell()
        await shell.run("x=before; cd /tmp")
        result = await shell.run(f"x=after; {command}", timeout_s=0.3)
        assert not result.ok
        kept = await shell.run("echo $x; pwd")
        assert kept.text in ("before\n/tmp\n", "after\n/tmp\n")
        assert kept.text.startswith("before") or "sleep" in command

    @promise
    async def test_the_result_is_the_commands_own(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        result = await shell.run("echo out; echo err >&2; exit 42")
        assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 42)
        assert (await shell.run("no-such-command")).exit_code == 127
        assert (await shell.run("if")).exit_code == 2
        assert (await shell.run("kill -9 $$")).exit.signal == 9
        assert (await shell.run("sleep 1000", timeout_s=0.2)).limit == "time"

    @promise
    async def test_set_e_lasts_until_it_is_taken_back(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        await shell.run("set -e")
        assert (await shell.run("false; echo reached")).stdout == b""
        assert (await shell.run("set +e; false; echo reached")).stdout == b"reached\n"
        assert (await shell.run("false; echo reached")).stdout == b"reached\n"

    @promise
    async def test_here_documents_and_many_lines_work(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        script = "cat > script.sh <<'EOF'\necho $1 \"quoted\"\nEOF\nfor i in 1 2; do\n  bash script.sh $i\ndone\n"
        assert (await shell.run(script)).stdout == b"1 quoted\n2 quoted\n"

    @promise
    async def test_lines_in_errors_are_counted_from_the_command(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        assert "line 3" in (await shell.run("true\ntrue\nno-such-command\n")).error_text

    @promise
    async def test_input_is_the_commands_and_not_the_shells(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        result = await shell.run('read -r x; echo "[$x]"; cat', input=b"exit 5\necho spoofed\n")
        assert result.stdout == b"[exit 5]\necho spoofed\n"
        assert (await shell.run("cat")).stdout == b""

    @promise
    async def test_what_is_put_in_the_background_goes_on(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        result = await shell.run("sleep 1000 & pid=$!; echo started")
        assert result.stdout == b"started\n"
        assert (await shell.run("kill -0 $pid && kill $pid && echo ended")).stdout == b"ended\n"

    @promise
    async def test_tracing_shows_the_command_alone(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        await shell.run("set -x")
        traced = await shell.run("echo seen")
        assert "echo seen" in traced.error_text and "skep" not in traced.error_text
        await shell.run("set +x")
        assert (await shell.run("echo seen")).stderr == b""

    @promise
    async def test_commands_given_at_once_run_one_after_the_other(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        await shell.run("x=0")
        await asyncio.gather(*(shell.run("x=$((x + 1))") for _ in range(10)))
        assert (await shell.run("echo $x")).stdout == b"10\n"

    @promise
    async def test_shells_of_one_sandbox_are_apart(self, sandbox: Sandbox) -> None:
        first, second = await sandbox.shell(), await sandbox.shell(user="root")
        await first.run("x=first; cd /tmp")
        assert (await second.run("echo [$x]; pwd; id -u")).stdout == b"[]\n/workspace\n0\n"
        assert (await first.run("echo [$x]; id -un")).stdout == b"[first]\nagent\n"

    @promise
    async def test_a_cancelled_command_leaves_the_shell_usable(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        await shell.run("x=1")
        call = asyncio.ensure_future(shell.run("sleep 1000"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await shell.run("echo $x")).stdout == b"1\n"

    @promise
    async def test_a_closed_shell_forgets(self, sandbox: Sandbox) -> None:
        shell = await sandbox.shell()
        await shell.run("x=1")
        await shell.close()
        await shell.close()
        assert (await shell.run("echo [$x]")).stdout == b"[]\n"
