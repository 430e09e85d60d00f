"""Brokers and schedulers as processes, each started again at once, and who kills them."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dsec.stack.child import Child, ServiceSpec
from dsec_common.errors import DsecError
from dsec_common.processes import wait_exit
from soak.control.model import Model

_START_S: Final = 90.0
_STOP_S: Final = 30.0
#: A part that will not live is tried again after this long.
_PAUSE_S: Final = 1.0
#: How often all of one kind die at the same moment, and how often two of any kind do.
_ALL_OF_A_KIND: Final = 0.1
_TWO: Final = 0.3


class Part:
    """One broker or scheduler for the whole run: when its process ends, the next one starts."""

    def __init__(self, spec: ServiceSpec, model: Model) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self._model = model
        self._child: Child | None = None
        self._killed = False

    @property
    def kind(self) -> str:
        """``broker`` or ``scheduler``."""
        return self.spec.name.split("-")[0]

    def kill(self) -> None:
        """End its process with SIGKILL, also one that still starts; one that is gone stays so."""
        identity = self._child.identity if self._child is not None else None
        if identity is not None and identity.signal(signal.SIGKILL):
            self._killed = True
            self._model.killed(self.spec.name)

    def stall(self, for_s: float) -> bool:
        """Let its process stand still for so long; return whether there was one."""
        identity = self._child.identity if self._child is not None else None
        if identity is None or not identity.signal(signal.SIGSTOP):
            return False
        self._model.note(f"{self.spec.name} stands still for {for_s:g} s")
        asyncio.get_running_loop().call_later(for_s, identity.signal, signal.SIGCONT)
        return True

    async def run(self) -> None:
        """Keep it running until cancelled, then stop it in order."""
        while True:
            self._killed = False
            await self._live_once()
            if not self._killed:
                self._model.violate("ended by itself, or did not start", self.spec.name)
                await asyncio.sleep(_PAUSE_S)

    async def _live_once(self) -> None:
        child = self._child = Child(self.spec, _say_nothing)
        stopped = False
        try:
            await child.start(_START_S)
            identity = child.identity
            if identity is not None:
                self.ready.set()
                await wait_exit(identity.pid)
        except DsecError as error:
            if not self._killed:
                self._model.violate(error.message, self.spec.name)
        except asyncio.CancelledError:
            stopped = True
            raise
        finally:
            self.ready.clear()
            in_order = await child.stop(_STOP_S)
            if stopped and not in_order and not self._killed:
                self._model.violate("did not stop in order", self.spec.name)


class Chaos:
    """Kills parts until it is cancelled."""

    def __init__(self, parts: Sequence[Part], *, seed: int, every_s: float) -> None:
        self._parts = parts
        self._every_s = every_s
        self._random = random.Random(f"{seed} chaos")  # noqa: S311  to be repeated

    async def run(self) -> None:
        """Kill until cancelled."""
        while True:
            await asyncio.sleep(self._every_s * self._random.uniform(0.4, 1.6))
            for part in self._victims():
                part.kill()

    def _victims(self) -> Sequence[Part]:
        pick = self._random.random()
        if pick < _ALL_OF_A_KIND:
            kind = self._random.choice(self._parts).kind
            return [part for part in self._parts if part.kind == kind]
        return self._random.sample(self._parts, 2 if pick < _TWO else 1)


async def _say_nothing(what: str, facts: Mapping[str, Any]) -> None:
    """Take a report that nobody waits for."""
