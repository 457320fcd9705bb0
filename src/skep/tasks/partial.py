"""An honest answer for a task that a limit ended before it was done."""

from __future__ import annotations

from collections.abc import Sequence

from skep.agent.conversation import Conversation
from skep.errors import LimitReached
from skep.healing.failure import Failure
from skep.models.failures import ModelFailure
from skep.state.events import Event, Proposed
from skep.tasks.outline import describe
from skep.tasks.thinking import Thinker

#: How many of the last acts are told of where no model tells of them.
_ACTS = 5
_ASK = (
    "The task ends here: {why}. Write the reply to the person now, in a few sentences: what you have done, what you "
    "have found, what is missing, and where the files are. Claim nothing that you have not done."
)


async def partial_reply(talk: Conversation, failure: Failure, thinker: Thinker, happened: Sequence[Event]) -> str:
    """Have the worker say what there is, if one more answer is within the limits; else say it plainly."""
    plain = stopped(failure.message, happened)
    talk.settle()
    talk.say(_ASK.format(why=failure.message))
    try:
        said = (await thinker.ask("reply", talk.messages)).text
    except (LimitReached, ModelFailure):
        return plain
    return f"{said}\n\n(Not finished: {failure.message}.)" if said else plain


def stopped(why: str, happened: Sequence[Event] = ()) -> str:
    """Say without a model why a task ended before it was done, and what it did last."""
    acts = [describe(event.action) for event in happened if isinstance(event, Proposed)]
    if not acts:
        return f"I had to stop before this was done: {why}."
    last = "".join(f"\n- {one}" for one in acts[-_ACTS:])
    count = f" (of {len(acts)})" if len(acts) > _ACTS else ""
    return f"I had to stop before this was done: {why}. What I did last{count}:{last}"
