"""Skills: scripts of the hive that are run in the sandbox, and say by a status how it went.

A line of JSON with a `status`, as HTTP has them, is a skill's own word on that: from 400 on it was refused, from 500 on
something broke, and 204 is nothing to show for it. A script that says nothing is judged by its exit code.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from skep.agent.actions import UseSkill
from skep.agent.desk import Desk
from skep.agent.observations import Observation, SkillRan
from skep.agent.skillfile import Skill, find_skill
from skep.agent.tool import Tool
from skep.agent.tools.paths import HOME
from skep.agent.tools.printed import printed, trouble
from skep.agent.tools.shortfall import failed_by_itself
from skep.errors import InvalidRequest, SkepError

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Execution

_INTERPRETERS = {"py": "python3", "sh": "bash", "js": "node"}
_STATUS_LINES = 200
_STATUS_CHARS = 64 << 10
_MESSAGE_CHARS = 1_000


async def use_skill(action: UseSkill, desk: Desk) -> Observation:
    computer = await desk.computer()
    skill = find_skill(desk.skills, action.skill)
    usual_s = desk.timeout_s(action.kind)
    done = await computer.run(_command(skill, action), cwd=HOME, env=_environment(action), timeout_s=usual_s)
    told = await printed(computer, action, done)
    if (failed := failed_by_itself(action, done, told, timeout_s=usual_s)) is not None:
        return failed
    said = last_status(done.text)
    status = said.get("status")
    outcome = {"exit_code": done.exit_code, "status": status, **told}
    if (failure := judge(done, status)) is not None:
        return trouble(action, failure, _message(done, said), fallback=skill.fallback, **outcome)
    return SkillRan(stamp=action.stamp, skill=action.skill, **outcome)


def judge(done: Execution, status: int | None) -> str | None:
    """Name the failure that an exit code and a status stand for, if they do."""
    if status is not None and status >= 400:
        return "tool_refused" if status < 500 else "tool_error"
    if not done.ok:
        return "tool_error"
    return "empty_result" if status == 204 else None


def last_status(stdout: str) -> dict[str, Any]:
    """Return the last line of an output that is a JSON object with a status, or nothing."""
    for line in reversed(stdout[-_STATUS_CHARS:].splitlines()[-_STATUS_LINES:]):
        if not line.lstrip().startswith("{"):
            continue
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue
        status = said.get("status")
        if isinstance(status, int) and not isinstance(status, bool) and 100 <= status <= 599:
            return dict(said)
    return {}


def is_repeatable(action: UseSkill, desk: Desk) -> bool:
    """Say whether the skill declares that a second run with the same key does nothing more."""
    try:
        return find_skill(desk.skills, action.skill).idempotent
    except SkepError:
        return False


def _command(skill: Skill, action: UseSkill) -> list[str]:
    skill.require_script(action.script)
    path = f"./hive/skills/{skill.shelf}/{skill.name}/scripts/{action.script}"
    interpreter = _INTERPRETERS.get(action.script.rpartition(".")[2])
    return [*([interpreter] if interpreter else []), path, *action.arguments]


def _environment(action: UseSkill) -> dict[str, str]:
    for name in action.environment:
        if not (name.isascii() and name.isidentifier()) or name.startswith("SKEP_"):
            raise InvalidRequest(f"{name[:60]!r} cannot be set for a skill", hint="use letters, digits and _")
    return {**action.environment, "SKEP_IDEMPOTENCY_KEY": action.stamp.key, "SKEP_SKILL": action.skill}


def _message(done: Execution, said: dict[str, Any]) -> str:
    status = f"status {said['status']}" if said else f"exit code {done.exit_code}"
    reason = next((said[name] for name in ("message", "error", "detail") if isinstance(said.get(name), str)), "")
    reason = reason or done.error_text.strip().rsplit("\n", 1)[-1]
    return f"the skill ended with {status}: {reason}"[:_MESSAGE_CHARS].rstrip(": ")


TOOLS = (Tool(UseSkill, use_skill, network=True, repeatable=is_repeatable),)
