"""A queue is looked at when its bell rings, and no ring is lost."""

from __future__ import annotations

import threading

from skep.tasks.queues import PROMPTS, Bell, Listeners

LONG_S = 30.0


def test_a_bell_that_rang_before_anybody_waited_is_heard_once() -> None:
    bell = Bell()
    bell.ring()
    assert bell.wait(LONG_S) is False
    heard = threading.Event()

    def wait() -> None:
        bell.wait(LONG_S)
        heard.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert not heard.wait(0.05)
    bell.ring()
    assert heard.wait(LONG_S)
    waiting.join()


def test_whoever_waits_for_a_bell_is_told_when_it_is_over() -> None:
    bell, ends = Bell(), []
    waiting = threading.Thread(target=lambda: ends.append(bell.wait(LONG_S)), daemon=True)
    waiting.start()
    bell.set()
    waiting.join(LONG_S)
    assert ends == [True]
    assert bell.wait(LONG_S) is True


def test_a_bell_that_nobody_listens_to_may_ring() -> None:
    listeners = Listeners()
    listeners.ring(PROMPTS)
    assert not listeners.listening
    listeners.stop()
