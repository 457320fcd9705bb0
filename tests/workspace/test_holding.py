"""The lock on a workspace is its holder's alone to give back, and is free as soon as that has done so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skep.workspace.holding import Holding, Taken


def test_a_lock_that_was_given_back_is_free_whoever_has_a_copy_of_the_descriptor(tmp_path: Path) -> None:
    """A child on its way to another program has one, until the kernel closes it there."""
    holding = Holding.take(tmp_path)
    copy = os.dup(holding._fd)
    try:
        with pytest.raises(Taken):
            Holding.take(tmp_path)
        holding.close()
        Holding.take(tmp_path).close()
    finally:
        os.close(copy)


def test_a_forked_child_lets_go_of_its_copy_and_not_of_the_lock(tmp_path: Path) -> None:
    holding = Holding.take(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(holding._fd >= 0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(Taken, match=str(os.getpid())):
        Holding.take(tmp_path)
    holding.close()
