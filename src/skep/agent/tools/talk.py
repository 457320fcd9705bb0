"""Speaking to the person: a question, and the reply that ends a task."""

from __future__ import annotations

from skep.agent.actions import AskUser, Finish
from skep.agent.desk import Desk
from skep.agent.observations import Answered, Observation
from skep.agent.tool import Tool
from skep.agent.tools.printed import trouble

_SILENCE = "Nobody answered in time. Decide by yourself, and say how you did."


async def ask_user(action: AskUser, desk: Desk) -> Observation:
    if desk.ask is None:
        return trouble(action, "tool_error", "nobody can be asked here; decide by yourself, and say how you did")
    answer = await desk.ask(action)
    if answer is None:
        return Answered(stamp=action.stamp, answer=_SILENCE, answered=False)
    return Answered(stamp=action.stamp, answer=answer)


async def finish(action: Finish, desk: Desk) -> Observation:
    """Say that it is heard: the loop ends a task before it comes to this."""
    return Answered(stamp=action.stamp, answer="The reply was taken.")


TOOLS = (
    Tool(AskUser, ask_user, reach="person", repeatable=True),
    Tool(Finish, finish, reach="person", repeatable=True),
)
