"""One rollout, from the trainer's side: a sandbox, an agent in it, a policy that answers it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from dsec import DSecClient, Rollout
from examples.repair.policy import RepairPolicy
from examples.repair.tasks import LIMITS, TEST_COMMAND, TEST_ENVIRONMENT, Task

AGENT_COMMAND = ("python3", "/opt/agent/agent.py")
AGENT_TIMEOUT_S = 150


@dataclass(frozen=True)
class Outcome:
    """What came of a rollout."""

    task: Task
    sandbox_id: str
    stages: int
    tried: int
    reward: float
    verified: bool
    edit: str
    create_ms: float
    seconds: float


async def _train(rollout: Rollout, policy: RepairPolicy) -> tuple[int, float]:
    """Answer every stage that the agent reports; return how many, and the sum of rewards."""
    stages, total = 0, 0.0
    async for stage in rollout.stages():
        stages += 1
        decision = policy.decide(stage.name, stage.payload)
        total += decision.reward or 0.0
        await stage.reply(decision.action, reward=decision.reward, done=decision.done)
        if decision.done:
            break
    return stages, total


async def run_rollout(client: DSecClient, task: Task) -> Outcome:
    """Run one task to its end and delete everything it used.

    Raises:
        RuntimeError: the agent failed; its output is in the message.
    """
    started = time.monotonic()
    policy = RepairPolicy()
    rollout = await client.rollouts.open(labels={"task": task.name})
    sandbox = await client.create_sandbox(
        task.base,
        workspace=task.workspace,
        toolkits=(task.toolkit,),
        limits=LIMITS,
        agent="repair",
        rollout_id=rollout.id,
    )
    create_ms = 1000 * (time.monotonic() - started)
    async with sandbox:
        training = asyncio.create_task(_train(rollout, policy))
        try:
            result = await sandbox.exec(AGENT_COMMAND, timeout_s=AGENT_TIMEOUT_S)
            if result.exit_code != 0:
                raise RuntimeError(f"the agent of {task.name} failed:\n{result.stderr_text}")
            stages, total = await training
        finally:
            training.cancel()
        # The reward is not taken on the agent's word: the trainer runs the tests itself.
        check = await sandbox.exec(
            TEST_COMMAND, cwd="/workspace", env=TEST_ENVIRONMENT, timeout_s=30
        )
    await rollout.close()
    return Outcome(
        task=task,
        sandbox_id=sandbox.id,
        stages=stages,
        tried=policy.tried,
        reward=round(total, 2),
        verified=check.exit_code == 0,
        edit=str(policy.solution) if policy.solution else "",
        create_ms=create_ms,
        seconds=time.monotonic() - started,
    )
