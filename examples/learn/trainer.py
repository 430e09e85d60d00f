"""The trainer: groups of rollouts in sandboxes of one snapshot, and what is learnt from each."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec import DSecClient, DsecError, ErrorCode, Limits, Rollout, Sandbox, Snapshot, agent_channel
from examples.learn.policy import Episode, State, TabularPolicy
from examples.learn.task import ARCHIVE, COMMANDS, REPORT, STEPS_MAX, WORK, Task, make_task

AGENT: Final = Path(__file__).parent / "agent" / "agent.py"
AGENT_COMMAND: Final = ("python3", "/agent/agent.py")
AGENT_TIMEOUT_S: Final = 60
#: So much more often is clearly more often: by chance a random policy's rate does not move so far.
CLEARLY: Final = 0.4
#: Of every sandbox of a training.
LABELS: Final = {"example": "learn"}
LIMITS: Final = Limits(memory_bytes=64 << 20, disk_bytes=8 << 20, pids=32)


@dataclass(frozen=True)
class Settings:
    """What a training is determined by: with the same ones it takes the same course.

    Attributes:
        groups: how many groups of episodes there are; the policy learns after each.
        size: episodes of a group, which run at once.
        seed: of the tasks and of the policy's draws.
        learning_rate: see :class:`TabularPolicy`; 0 is a random policy.
    """

    groups: int = 20
    size: int = 12
    seed: int = 1
    learning_rate: float = 2.0


@dataclass
class Training:
    """What came of it: the part of each group's episodes that solved their task."""

    success_rates: list[float] = field(default_factory=list)

    @property
    def has_learnt(self) -> bool:
        """Whether tasks are solved clearly more often in the end than in the beginning."""
        return self.last_quarter >= self.first_quarter + CLEARLY

    @property
    def quarter(self) -> int:
        """How many groups are a quarter of all, at least one."""
        return max(1, len(self.success_rates) // 4)

    @property
    def first_quarter(self) -> float:
        """The mean success rate of the first quarter of the groups."""
        return sum(self.success_rates[: self.quarter]) / self.quarter

    @property
    def last_quarter(self) -> float:
        """The mean success rate of the last quarter of the groups."""
        return sum(self.success_rates[-self.quarter :]) / self.quarter


async def train(
    client: DSecClient, base: str, settings: Settings, told: Callable[[int, float], None]
) -> Training:
    """Train a policy from nothing; ``told`` gets each group's number and success rate.

    Args:
        client: of the platform that has the sandboxes.
        base: a base layer with a shell, tar, gzip, sort, wc and Python.
        settings: what the course depends on.
        told: called after each group.
    """
    policy = TabularPolicy(len(COMMANDS), settings.learning_rate)
    training = Training()
    for number in range(settings.groups):
        task = make_task(f"{settings.seed}/{number}")
        async with _prepared(client, base, task) as snapshot:
            group = await asyncio.gather(
                *(
                    # What one draws depends on nothing but its number: not on who is faster.
                    _episode(client, snapshot, task, policy, f"{settings.seed}/{number}/{member}")
                    for member in range(settings.size)
                )
            )
        policy.learn(group)
        training.success_rates.append(sum(episode.reward for episode in group) / len(group))
        told(number, training.success_rates[-1])
    return training


@contextlib.asynccontextmanager
async def _prepared(client: DSecClient, base: str, task: Task) -> AsyncIterator[Snapshot]:
    """Yield what all episodes of a group begin with: the agent, and the archive."""
    async with await client.create_sandbox(base, limits=LIMITS, labels=LABELS) as sandbox:
        await sandbox.upload(agent_channel.__file__, "/agent/agent_channel.py")
        await sandbox.upload(AGENT, AGENT_COMMAND[-1])
        await sandbox.write_file(f"{WORK}/{ARCHIVE}", task.archive)
        snapshot = await sandbox.snapshot("begun")
    try:
        yield snapshot
    finally:
        await snapshot.delete()


async def _episode(
    client: DSecClient, snapshot: Snapshot, task: Task, policy: TabularPolicy, seed: str
) -> Episode:
    """Run one rollout in a sandbox of its own, to its end."""
    rollout = await client.rollouts.open(labels={"episode": seed})
    sandbox = await client.create_sandbox(
        snapshot=snapshot,
        limits=LIMITS,
        env={"WORK": WORK},
        labels=LABELS,
        agent="learner",
        rollout_id=rollout.id,
    )
    async with sandbox, asyncio.TaskGroup() as both:
        answering = both.create_task(_answer(rollout, sandbox, task, policy, seed))
        await sandbox.exec(AGENT_COMMAND, timeout_s=AGENT_TIMEOUT_S, check=True)
    await rollout.close()
    return answering.result()


async def _answer(
    rollout: Rollout, sandbox: Sandbox, task: Task, policy: TabularPolicy, seed: str
) -> Episode:
    """Answer each stage with a command, until there is a report or no command is left."""
    chance = random.Random(seed)  # noqa: S311  a seeded draw, not a secret
    episode = Episode()
    async for stage in rollout.stages():
        state: State = tuple(stage.payload["files"])
        if REPORT in state or len(episode.steps) == STEPS_MAX:
            # Not on the agent's word: the trainer looks itself.
            episode.reward = float(task.is_solved_by(await _report(sandbox)))
            await stage.reply(reward=episode.reward, done=True)
            break
        action = policy.choose(state, chance)
        episode.steps.append((state, action))
        await stage.reply({"command": COMMANDS[action]})
    return episode


async def _report(sandbox: Sandbox) -> bytes:
    try:
        return await sandbox.read_file(f"{WORK}/{REPORT}")
    except DsecError as error:
        if error.code is ErrorCode.NOT_FOUND:
            return b""
        raise
