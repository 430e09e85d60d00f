"""Agents that only step: one connection to a sandbox's socket each, all in this one process.

``python -m benchmarks._step_agents`` reads commands from its standard input, a line of JSON each,
and answers with a line each: ``{"sockets": […]}`` connects to those; ``{"first": 3, "count": 200}``
has that agent step so often and answers with the seconds of each; ``{"seconds": 5}`` has all of
them step for so long and answers with the number of steps and the seconds of some.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from typing import Any, Final, cast

import msgspec
import uvloop

_LENGTH: Final = struct.Struct(">I")
_OBSERVATION: Final = {"tests": 12, "failed": 3, "log": "x" * 200}


class Agent(asyncio.Protocol):
    """One agent; at most one step is under way."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport
        self._received = bytearray()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._seq = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Take what has come of an answer."""
        self._received += data
        if len(self._received) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(self._received)
        if len(self._received) < _LENGTH.size + length or self._answer is None:
            return
        answer = msgspec.json.decode(self._received[_LENGTH.size : _LENGTH.size + length])
        del self._received[: _LENGTH.size + length]
        self._answer.set_result(answer)

    async def step(self) -> float:
        """Step once, until the feedback is there; return the seconds."""
        self._seq += 1
        self._answer = asyncio.get_running_loop().create_future()
        request = {
            "id": self._seq,
            "op": "step",
            "seq": self._seq,
            "stage": "tests_run",
            "payload": {**_OBSERVATION, "step": self._seq},
            "wait_s": 60,
        }
        body = msgspec.json.encode(request)
        began = time.perf_counter()
        self._transport.write(_LENGTH.pack(len(body)) + body)
        answer = await self._answer
        elapsed = time.perf_counter() - began
        assert answer["result"]["payload"] == {"to": self._seq}, answer
        return elapsed


async def step_until(agent: Agent, end: float, taken: list[float]) -> None:
    """Have one agent step, step after step."""
    while time.perf_counter() < end:
        taken.append(await agent.step())


async def main() -> None:
    """Do what each line says, until there is no more."""
    loop = asyncio.get_running_loop()
    agents: list[Agent] = []
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        if "sockets" in command:
            for path in command["sockets"]:
                _, agent = await loop.create_unix_connection(Agent, path)
                agents.append(agent)
            answer: Any = len(agents)
        elif "first" in command:
            agent = agents[command["first"]]
            answer = [await agent.step() for _ in range(command["count"])]
        else:
            taken: list[float] = []
            began = time.perf_counter()
            end = began + command["seconds"]
            await asyncio.gather(*(step_until(agent, end, taken) for agent in agents))
            elapsed = time.perf_counter() - began
            answer = {"steps": len(taken), "seconds": elapsed, "taken": sorted(taken)[::50]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
