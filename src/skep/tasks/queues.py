"""The queues of DBOS from which this process takes work: looked at when something may be there, and now and then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dbos import DBOS
    from dbos._queue import Queue

PROMPTS, WORK, AFTERWARDS = "skep-prompts", "skep-work", "skep-afterwards"
#: How often each is looked at though no bell rang: for what another process put there, and died.
LOOK_S = {PROMPTS: 2.0, WORK: 2.0, AFTERWARDS: 5.0}


class Bell(threading.Event):
    """What DBOS waits for between two looks at a queue: `ring` makes it look at once, `set` makes it stop."""

    def __init__(self) -> None:
        super().__init__()
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def set(self) -> None:
        super().set()
        self._rung.set()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._rung.wait(timeout)
        # Before the look: what is put there during it has another look.
        self._rung.clear()
        return self.is_set()


class Listeners:
    """One thread for each queue. DBOS's own threads look at intervals alone, and so either late or all the time."""

    def __init__(self) -> None:
        self._bells: dict[str, Bell] = {}
        self._threads: list[threading.Thread] = []

    def start(self, dbos: DBOS, queues: list[Queue]) -> None:
        """Take work from now on; DBOS has to be launched, and to leave these queues alone."""
        from dbos._queue import queue_worker_thread

        for queue in queues:
            bell = self._bells[queue.name] = Bell()
            # Whoever ends DBOS ends these with its own threads.
            dbos.background_thread_stop_events.append(bell)
            arguments = (bell, dbos, queue)
            thread = threading.Thread(target=queue_worker_thread, args=arguments, name=queue.name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self.ring(*self._bells)

    @property
    def listening(self) -> bool:
        """Whether every queue is looked at."""
        return len(self._threads) == len(LOOK_S) and all(thread.is_alive() for thread in self._threads)

    def ring(self, *names: str) -> None:
        """Have queues looked at, if somebody listens to them."""
        for name in names:
            if (bell := self._bells.get(name)) is not None:
                bell.ring()

    def stop(self) -> None:
        """Take no more work, and wait for the looks that are under way; they need the loop."""
        for bell in self._bells.values():
            bell.set()
        for thread in self._threads:
            thread.join()
        self._bells.clear()
        self._threads.clear()
