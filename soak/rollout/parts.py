"""NATS and the trainers as parts that are killed and start again, and who kills them."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from dsec_common.embedded.nats import NatsServer
from dsec_common.errors import DsecError
from dsec_common.processes import wait_exit
from soak.chaos_run import Part, RunModel
from soak.rollout.trainer import FENCED, Settings

#: How often each kind is chosen, that a second trainer starts while the first lives, and that a
#: Chronus stands still for longer than its lease: others own its shards when it goes on.
_WEIGHTS: Final = {"trainer": 3, "rival": 1, "chronus": 3, "stall": 1, "sandboxd": 3, "nats": 1}
_STALL_S: Final = (2.0, 6.0)
#: How often two are killed at the same moment.
_TWO: Final = 0.2
#: A part that will not live is tried again after this long.
_PAUSE_S: Final = 1.0
_KILLED: Final = -signal.SIGKILL


class Killable(Protocol):
    """One part of what runs."""

    @property
    def kind(self) -> str:
        """What it is one of."""

    def kill(self) -> None:
        """End its process with SIGKILL; one that is gone stays so."""


class NatsPart:
    """The NATS server, which starts again on its port when it is killed."""

    kind = "nats"

    def __init__(self, server: NatsServer, model: RunModel) -> None:
        self._server = server
        self._model = model

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._server.running:
            os.kill(self._server.pid, signal.SIGKILL)
            self._model.killed(self.kind)

    async def run(self) -> None:
        """Keep it running until cancelled."""
        while True:
            await wait_exit(self._server.pid)
            await self._server.kill()
            while not self._server.running:
                try:
                    await self._server.start()
                except DsecError as error:
                    self._model.violate(error.message, self.kind)
                    await asyncio.sleep(_PAUSE_S)


class Trainers:
    """The newest trainer, which is followed by the next when it is killed, and those before it.

    Attributes:
        finished: one has seen all rollouts come to their end.
        rivals: how many were started while another lived.
        fenced: how many of those before were told so.
    """

    kind = "trainer"

    def __init__(self, settings: Settings, model: RunModel) -> None:
        self.finished = asyncio.Event()
        self.rivals = 0
        self.fenced = 0
        self._settings = settings
        self._model = model
        self._number = 0
        self._newest: asyncio.subprocess.Process | None = None
        self._lives: set[asyncio.Task[None]] = set()
        self._living: set[int] = set()
        self._not_alone: set[int] = set()

    def start(self) -> None:
        """Start a trainer; if one lives, it takes over from it."""
        self._number += 1
        self._newest = None
        self._living.add(self._number)
        if len(self._living) > 1:
            self._not_alone |= self._living
        life = asyncio.create_task(self._live(self._number), name=f"trainer {self._number}")
        self._lives.add(life)

    def rival(self) -> None:
        """Start a trainer while another one lives, if one does."""
        if self._newest is not None and not self.finished.is_set():
            self.rivals += 1
            self._model.note(f"trainer {self._number} gets a rival")
            self.start()

    def kill(self) -> None:
        """End the newest with SIGKILL."""
        if self._newest is not None and self._newest.returncode is None:
            self._newest.kill()
            self._model.killed(self.kind)

    async def _live(self, number: int) -> None:
        log = Path(self._settings.directory) / "trainers.log"
        settings = msgspec.structs.replace(self._settings, number=number)
        command = [sys.executable, "-m", "soak.rollout.trainer"]
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, msgspec.json.encode(settings).decode(), stdout=output, stderr=output
            )
        if number == self._number:
            self._newest = process
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._ended(number, code)

    def _ended(self, number: int, code: int) -> None:
        newest = number == self._number
        self._living.discard(number)
        self._model.note(f"trainer {number} ended with {code}")
        if code == 0:
            self.finished.set()
        elif code == FENCED and number in self._not_alone:
            self.fenced += 1
        elif code != _KILLED:
            self._model.violate(f"ended with {code}", f"trainer {number}")
        if newest:
            self._newest = None
            if code != 0:
                self.start()

    async def all_ended(self) -> None:
        """Return when none lives any more."""
        while self._lives:
            done, self._lives = await asyncio.wait(self._lives, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*done)

    async def stop(self) -> None:
        """End all that live."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)


class Chaos:
    """Kills parts until it is cancelled.

    Attributes:
        stalls: how often a Chronus was made to stand still.
    """

    def __init__(
        self,
        services: Sequence[Part],
        nats: NatsPart,
        trainers: Trainers,
        *,
        seed: int,
        every_s: float,
    ) -> None:
        self.stalls = 0
        self._services = services
        self._parts: list[Killable] = [*services, nats, trainers]
        self._trainers = trainers
        self._every_s = every_s
        self._random = random.Random(f"{seed} chaos")  # noqa: S311  to be repeated

    async def run(self) -> None:
        """Kill until cancelled."""
        while True:
            await asyncio.sleep(self._every_s * self._random.uniform(0.4, 1.6))
            for _ in range(2 if self._random.random() < _TWO else 1):
                self._strike()

    def _strike(self) -> None:
        kind = self._random.choices([*_WEIGHTS], weights=[*_WEIGHTS.values()])[0]
        if kind == "rival":
            self._trainers.rival()
        elif kind == "stall":
            part = self._random.choice([part for part in self._services if part.kind == "chronus"])
            self.stalls += part.stall(self._random.uniform(*_STALL_S))
        else:
            self._random.choice([part for part in self._parts if part.kind == kind]).kill()


def kinds(kills: Mapping[str, int]) -> dict[str, int]:
    """Return kills by kind: ``chronus-2`` is one of ``chronus``."""
    found: dict[str, int] = {}
    for name, count in kills.items():
        kind = name.partition("-")[0]
        found[kind] = found.get(kind, 0) + count
    return found
