"""Distinct lines of a log, for verifiers: ``vf-eval count-lines``, with this directory on the path.

The base layer is each task's image, which ``DSEC_BASE`` names, by default ``host@1``. The number
that is right never is in the agent's sandbox.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import verifiers.v1 as vf

from dsec.adapters.episodes import Verifier
from dsec.adapters.verifiers import DsecEnv, DsecRuntime, ShellHarness

__all__ = ["CountLines", "DsecEnv", "ShellHarness"]


class Log(vf.TaskData):
    """One log, drawn by its seed."""

    seed: int

    @property
    def lines(self) -> list[str]:
        """What is in it."""
        draw = random.Random(self.seed)  # noqa: S311  the same seed is the same task
        return [f"worker-{draw.randrange(12)} is done" for _ in range(30)]


class CountTask(vf.Task[Log]):
    """Count them."""

    async def setup(self, runtime: DsecRuntime) -> None:
        """Put the log where the agent begins."""
        await runtime.write("app.log", "\n".join(self.data.lines).encode() + b"\n")

    @vf.reward
    async def counted(self, runtime: DsecRuntime) -> float:
        """Compare the answer in a sandbox that the agent never was in."""
        expected = f"{len(set(self.data.lines))}\n"
        verifier = Verifier(
            ["cmp", "/work/answer", "/verify/answer"], files={"/verify/answer": expected}
        )
        return await runtime.verified(verifier)


class CountLines(vf.Taskset[CountTask]):
    """Eight logs."""

    def load(self) -> Iterable[CountTask]:
        """Return a task for each."""
        for seed in range(8):
            data = Log(
                seed=seed,
                prompt="How many distinct lines has app.log? Write the number to the file answer.",
                image=os.environ.get("DSEC_BASE", "host@1"),
                resources=vf.TaskResources(memory=0.0625),
            )
            yield CountTask(data, self.config.task)
