"""Either cloud, as a test of what lies above them has it: run it, look at its machines, break it."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.clouds.daytona.cloud import Cloud, served
from tests.clouds.e2b.cloud import PlayedCloud, played

NAMES = ("e2b", "daytona")


class Provider(abc.ABC):
    """A cloud on loopback."""

    name: str
    #: What the mechanism is told to use this cloud and no other.
    options: dict[str, Any]

    @abc.abstractmethod
    def machines(self) -> dict[str, dict[str, str]]:
        """Return the labels of every machine, by its id."""

    @abc.abstractmethod
    def kill(self, machine: str) -> None:
        """Lose a machine with all that is on it."""

    @abc.abstractmethod
    def lose_touch(self) -> None:
        """Answer nobody from now on."""

    @abc.abstractmethod
    def mend(self) -> None: ...

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, str]:
        """What config.json says about it."""

    @property
    @abc.abstractmethod
    def variables(self) -> dict[str, str]:
        """What the environment says about it."""


class E2B(Provider):
    name = "e2b"

    def __init__(self, cloud: PlayedCloud) -> None:
        self._cloud = cloud
        self.options = cloud.options

    def machines(self) -> dict[str, dict[str, str]]:
        return {one["sandboxID"]: one["metadata"] for one in self._cloud.machines()}

    def kill(self, machine: str) -> None:
        self._cloud.kill(machine)

    def lose_touch(self) -> None:
        final = {"should-retry": "false"}
        self._cloud.break_({"match": "^[A-Z]+ /(?!_control)", "times": 10**6, "status": 503, "headers": final})

    def mend(self) -> None:
        self._cloud.break_()

    @property
    def settings(self) -> dict[str, str]:
        return {"api_url": self.options["api_url"]}

    @property
    def variables(self) -> dict[str, str]:
        return {"E2B_API_KEY": self.options["api_key"], "E2B_SANDBOX_URL": self.options["sandbox_url"]}


class Daytona(Provider):
    name = "daytona"

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self.options = cloud.options

    def machines(self) -> dict[str, dict[str, str]]:
        found = self._cloud.machines()
        return {
            ident: {name.removeprefix("skep."): value for name, value in one["labels"].items()}
            for ident, one in found.items()
        }

    def kill(self, machine: str) -> None:
        self._cloud.destroy(machine)

    def lose_touch(self) -> None:
        self._cloud.fail(".*", times=10**6, status=503)

    def mend(self) -> None:
        self._cloud.mend()

    @property
    def settings(self) -> dict[str, str]:
        return {"api_url": self.options["api_url"], "target": self.options["target"]}

    @property
    def variables(self) -> dict[str, str]:
        return {"DAYTONA_API_KEY": self.options["api_key"]}


@contextmanager
def run(name: str) -> Iterator[Provider]:
    """Run a cloud for a while."""
    if name == "e2b":
        with played() as cloud:
            yield E2B(cloud)
    else:
        with served() as daytona:
            yield Daytona(daytona)
