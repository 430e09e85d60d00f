"""A group's trainer: as a function, and as a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from dsec import DSecClient
from dsec.channel import Channel
from dsec.rollouts import Rollouts
from dsec_common.bus import Bus
from dsec_common.testing.nats import NatsForTests

GROUP = "train"


async def train(rollouts: Rollouts, tasks: int, steps: int, who: str) -> list[tuple[int, int]]:
    """Answer each step of the group with who answered it; return which came: tasks and numbers.

    The last step of each rollout, number ``steps``, is answered with ``done``.
    """
    seen = []
    async with rollouts.group(GROUP, [{"goal": index} for index in range(tasks)]) as group:
        async for step in group.steps():
            assert step.task == {"goal": step.index}
            assert step.observation == {"step": step.seq}
            seen.append((step.index, step.seq))
            answer = {"by": who, "to": step.observation}
            await step.reply(answer, reward=1.0, done=step.seq == steps)
    return seen


def rollouts_of(bus: Bus, project: str = "default") -> Rollouts:
    """Return a project's rollouts over a bus."""
    return Rollouts(Channel(bus, project))


@contextlib.asynccontextmanager
async def trainer_process(
    nats: NatsForTests, tasks: int, steps: int, who: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a process that trains; killed afterwards."""
    bus = nats.project_config()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        *(bus.servers[0], bus.credentials_path, str(tasks), str(steps), who),
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def main(server: str, credentials: str, tasks: str, steps: str, who: str) -> None:
    """Train until all is done."""
    async with DSecClient(server, credentials) as client:
        await train(client.rollouts, int(tasks), int(steps), who)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
