"""An honest answer for a task that a limit ended before it was done."""

from __future__ import annotations

from skep.agent.conversation import Conversation
from skep.agent.loop import Limits
from skep.healing.failure import Failure
from skep.models.failures import ModelFailure
from skep.tasks.meter import Meter
from skep.tasks.thinking import Thinker

_ASK = (
    "The task ends here: {why}. Write the reply to the person now, in a few sentences: what you have done, what you "
    "have found, what is missing, and where the files are. Claim nothing that you have not done."
)
_PLAIN = "I had to stop before this was done: {why}. What I made so far is in the workspace."


async def partial_reply(talk: Conversation, failure: Failure, thinker: Thinker, meter: Meter, limits: Limits) -> str:
    """Have the worker say what there is, if one more answer is within the other limits; else say it plainly."""
    plain = _PLAIN.format(why=failure.message)
    if not _has_room(meter, limits):
        return plain
    talk.settle()
    talk.say(_ASK.format(why=failure.message))
    try:
        said = (await thinker.ask("reply", talk.messages)).text
    except ModelFailure:
        return plain
    return f"{said}\n\n(Not finished: {failure.message}.)" if said else plain


def _has_room(meter: Meter, limits: Limits) -> bool:
    spent_all = limits.usd is not None and meter.usd >= limits.usd
    return not spent_all and meter.tokens < limits.tokens and meter.elapsed_s < limits.seconds
