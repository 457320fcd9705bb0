"""The engine of a program: a worker for tasks, with sandboxes and models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skep.app.apiary import Apiary, Tell, indexes, quiet
from skep.app.choosing import Chooser, demand
from skep.app.household import Household
from skep.app.modelling import build_models
from skep.app.program import Program
from skep.app.reception import open_sessions
from skep.config import Environment, Settings
from skep.governance.ruling import Policy
from skep.healing.breaker import Breakers
from skep.models.models import Models
from skep.sandbox.egress.policy import parse_policy
from skep.sandbox.mechanisms import MECHANISMS, at_least
from skep.sessions.controller import host_name
from skep.sessions.putting_away import stop_all
from skep.sessions.sessions import Sessions
from skep.state.flags import Flags
from skep.state.hives import Hive
from skep.tasks.agreement import Bounds
from skep.tasks.engine import Pace
from skep.tasks.worker import Worker
from skep.tasks.workshop import House, Workshop, open_worker
from skep.workspace.snapshot.indexes import Ecosystem


@dataclass(frozen=True, slots=True)
class Engine:
    """A worker, the sessions in which it works, and the models that it asks."""

    worker: Worker
    sessions: Sessions
    models: Models


@asynccontextmanager
async def open_engine(
    program: Program, environment: Environment, *, tell: Tell = quiet, patient: bool = True
) -> AsyncIterator[Engine]:
    """Work on tasks, and run sandboxes for them, in this process until the block ends.

    Processes that have joined one of the sandboxes are waited for then if `patient`, and else lose it.
    """
    settings, breakers = program.settings, Breakers()
    chooser = Chooser(settings, environment.cloud_keys, program=program, tell=tell)
    async with (
        build_models(settings, environment, is_open=lambda name: not breakers.begin(f"provider:{name}")) as models,
        open_sessions(program, keys=environment.store_keys, tell=tell, chooser=chooser) as sessions,
    ):
        workshop = Workshop(
            database=program.database,
            log=program.log,
            hives=program.hives,
            leases=program.leases,
            sessions=sessions,
            models=models,
            host=host_name(program.paths.home),
            household=partial(_house, program.paths.home),
            pace=_pace(settings),
            bounds=_bounds(settings),
            usd_per_day=settings.budgets.usd_per_day,
            confidence=settings.tasks.confidence,
            approval_timeout_s=settings.policy.approval_timeout_s,
            command_timeout_s=settings.sandbox.limits.command_timeout_s,
            network=bool(settings.policy.allowed_hosts),
            listed=partial(listed_packages, settings),
            policy=Policy(may_reach_out=frozenset(settings.policy.may_reach_out)),
            flags=partial(_flags, program),
            breakers=breakers,
            checkpoints=Apiary(program.paths, settings, environment.store_keys, chooser=chooser).workspaces,
        )
        async with open_worker(workshop) as worker:
            yield Engine(worker, sessions, models)
        if not patient:
            await stop_all(sessions, patient=False)


def _house(home: Path, hive: Hive) -> House:
    household = Household(home, hive.id, hive.account_id, hive.name)
    household.settle()
    return House(household.folder, household.skills)


async def _flags(program: Program, hive: Hive) -> Flags:
    return await program.rollouts.in_effect(hive.flags, hive.account_id)


def listed_packages(settings: Settings, hive: Hive) -> frozenset[Ecosystem]:
    """Return the packages that nobody is asked for: none where a hive demands more isolation than their trial has."""
    if not at_least(MECHANISMS["bubblewrap"].isolation, demand(settings, hive).isolation):
        return frozenset()
    return indexes(settings).listed(parse_policy(settings.policy.allowed_hosts))


def _pace(settings: Settings) -> Pace:
    wanted = settings.tasks
    return Pace(wanted.concurrent, wanted.concurrent_per_account, wanted.starts_per_minute)


def _bounds(settings: Settings) -> Bounds:
    wanted = settings.budgets
    return Bounds(
        usd=wanted.usd_per_task,
        steps=wanted.steps_per_task,
        requests=wanted.requests_per_task,
        tokens=wanted.tokens_per_task,
        seconds=wanted.seconds_per_task,
    )
