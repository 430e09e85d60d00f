"""Kills parts of a platform at random, each with SIGKILL, and notes when they are back."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dsec.stack.supervisor import Supervisor
    from soak.model import Model

#: How long a spawner's death may be felt: nobody tells that it is back.
_SPAWNER_BACK_S: Final = 15.0
#: One part, and how often it is chosen. Nodes are where sandboxes can be lost.
_WEIGHTS: Final = {
    "sandboxd": 5,
    "spawner": 4,
    "scheduler": 3,
    "broker": 2,
    "chronus": 1,
    "tracer": 1,
    "nats": 2,
    "kafka": 1,
}
#: How a start is told of that ended because we killed it.
_KILLED: Final = re.compile(r"signal 9|status -9")
#: What no answer of the platform waits for: its death is no excuse for anything.
_FELT_BY_NOBODY: Final = frozenset({"kafka", "tracer", "chronus"})


class Chaos:
    """Kills one part after another until it is cancelled."""

    def __init__(self, model: Model, *, seed: int, pause_s: tuple[float, float]) -> None:
        self._model = model
        self._random = random.Random(f"{seed} chaos")  # noqa: S311  to be repeated
        self._pause_s = pause_s

    async def heard(self, what: str, facts: Mapping[str, Any]) -> None:
        """Hear what the supervisor reports."""
        if what == "service_restarted":
            self._model.back(str(facts["name"]))
        elif what == "service_start_failed" and not _KILLED.search(str(facts.get("error"))):
            self._model.violate(f"did not start again: {facts.get('error')}", str(facts["name"]))
        elif what == "service_ended" and str(facts["name"]) not in self._model.kills:
            self._model.violate(f"ended by itself: {dict(facts)}", str(facts["name"]))

    async def run(self, supervisor: Supervisor) -> None:
        """Kill until cancelled."""
        while True:
            await asyncio.sleep(self._random.uniform(*self._pause_s))
            self.kill_one(supervisor)

    def kill_one(self, supervisor: Supervisor) -> None:
        """Kill one part; nothing happens when the chosen one is away already, or must not die.

        The embedded Kafka loses what it was told last, so only Apache Kafka is killed.
        """
        kind = self._random.choices([*_WEIGHTS], weights=[*_WEIGHTS.values()])[0]
        pick = self._random.random()
        candidates = [
            part
            for part in supervisor.parts()
            if part.process is not None
            and part.name.split("-")[0] == ("sandboxd" if kind == "spawner" else kind)
            and (kind != "kafka" or supervisor.options.kafka == "apache")
        ]
        if not candidates:
            return
        part = candidates[int(pick * len(candidates))]
        assert part.process is not None
        pid, name = part.process.pid, part.name
        if kind == "spawner":
            children = spawners(pid)
            if not children:
                return
            pid, name = children[0], f"spawner of {name}"
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        if kind in _FELT_BY_NOBODY:
            self._model.killed(name, for_s=0.0)
        else:
            self._model.killed(name, for_s=_SPAWNER_BACK_S if kind == "spawner" else 120.0)


def spawners(daemon: int) -> list[int]:
    """Return the processes of a node daemon's spawner."""
    try:
        # Each thread has children of its own.
        children = [
            child
            for listing in Path(f"/proc/{daemon}/task").glob("*/children")
            for child in listing.read_text().split()
        ]
        return [
            int(child)
            for child in children
            if Path(f"/proc/{child}/comm").read_text().strip() == "dsec-spawner"
        ]
    except OSError:
        return []
