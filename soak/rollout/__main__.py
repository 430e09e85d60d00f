"""Chaos in rollouts: ``python -m soak.rollout [--seed N] [--seconds N] [--json]``, as root.

Trainers, Chronus, node daemons, NATS and the agents themselves are killed with SIGKILL at random
while agents step in sandboxes; now and then a second trainer takes over from one that lives, or a
Chronus stands still for longer than its lease. In the end the journal, the agents' effects, the
trainers' ledgers and the platform's figures must tell of the same steps, each once. It exits with 0
when that is so, with 1 when it is not, with 2 when nothing could be started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from dsec_common.logging import configure_logging
from soak.chaos_run import tell_history
from soak.command_line import CommandLine
from soak.rollout.run import ChaosOptions, Summary, chaos

_COMMAND_LINE: Final = CommandLine(
    program="python -m soak.rollout",
    name="chaos-rollout",
    about=__doc__,
    seconds_from="CHAOS_SECONDS",
    seconds=300,
    counts={"nodes": 2, "chronuses": 3, "agents": 12},
    kill_every_s=2.0,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came of it, and return 0 when all is as it must be."""
    return _COMMAND_LINE.run(arguments, ChaosOptions, chaos, _tell)


def _tell(summary: Summary) -> None:
    told = ", ".join(f"{key} {summary.kills[key]}" for key in sorted(summary.kills))
    print(f"kills: {told or 'none'}; agents that killed themselves: {summary.agents_died}")
    print(f"stalls of a Chronus: {summary.stalls}")
    print(f"trainers: {summary.rivals} rivals started, {summary.fenced} fenced off")
    print(f"steps: {summary.steps}, of which {summary.seen_again} came to trainers again")
    print(
        f"journal: {summary.frames} frames by {summary.owners} owners of shards, and "
        f"{summary.unseen} replaced before they were read"
    )
    tell_history(summary)


if __name__ == "__main__":
    configure_logging("chaos", level="error")
    sys.exit(main())
