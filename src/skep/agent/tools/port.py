"""A server of the sandbox, made reachable for the person."""

from __future__ import annotations

from skep.agent.actions import ExposePort
from skep.agent.desk import Desk
from skep.agent.observations import Observation, PortExposed
from skep.agent.tool import Tool


async def expose_port(action: ExposePort, desk: Desk) -> Observation:
    exposure = await (await desk.computer()).expose(action.port)
    return PortExposed(stamp=action.stamp, port=action.port, link=exposure.link)


TOOLS = (Tool(ExposePort, expose_port, reach="outside", repeatable=True),)
