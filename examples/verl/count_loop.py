"""Distinct lines of a log, for verl: its agent loop ``count_lines``.

``agent_loops.yaml`` is its ``actor_rollout_ref.rollout.agent.agent_loop_config_path``; each row of
the dataset says ``agent_name: count_lines`` and has a ``seed``. ``DSEC_BASE`` names the base layer,
by default ``host@1``. The number that is right never is in the agent's sandbox.
"""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dsec.adapters.episodes import ShellTask, Verifier
from dsec.adapters.verl import DsecAgentLoop, HarnessRun
from dsec.sandbox import Sandbox

_AGENT: Final = Path(__file__).with_name("agent.py").read_text()


def _log(seed: int) -> list[str]:
    draw = random.Random(seed)  # noqa: S311  the same seed is the same task
    return [f"worker-{draw.randrange(12)} is done" for _ in range(30)]


async def _prepare(sandbox: Sandbox, seed: int) -> None:
    await sandbox.write_file("/opt/agent.py", _AGENT)
    await sandbox.write_file("/work/app.log", "\n".join(_log(seed)) + "\n")


class CountLines(DsecAgentLoop):
    """The harness ``agent.py``, told what the row's prompt says."""

    def harness(self, row: Mapping[str, Any]) -> HarnessRun:
        """Return its run on the log of the row's seed."""
        seed = int(row["seed"])
        expected = f"{len(set(_log(seed)))}\n"
        task = ShellTask(
            {"base": os.environ.get("DSEC_BASE", "host@1"), "memory_bytes": 128 << 20},
            Verifier(["cmp", "/work/answer", "/verify/answer"], files={"/verify/answer": expected}),
            prepare=_prepare,
            command_timeout_s=600.0,
        )
        told = str(row["raw_prompt"][-1]["content"])
        return HarnessRun(task, f"python3 /opt/agent.py {shlex.quote(told)}", seed=seed)
