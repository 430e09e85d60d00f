"""Chaos in the control plane: ``python -m soak.control [--seed N] [--seconds N] [--json]``.

Brokers and schedulers are killed with SIGKILL at random while users ask for sandboxes, Compute
Units, gangs and leases on nodes that only pretend. On every card allocated + free stays all there
is, no slice is in two leases, no request is lost and none is granted twice, and in the end nothing
is held. It exits with 0 when that is so, with 1 when it is not, with 2 when nothing could be
started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from dsec_common.logging import configure_logging
from soak.chaos_run import tell_history
from soak.command_line import CommandLine
from soak.control.run import ChaosOptions, Summary, chaos

_COMMAND_LINE: Final = CommandLine(
    program="python -m soak.control",
    name="chaos-control",
    about=__doc__,
    seconds_from="CHAOS_SECONDS",
    seconds=300,
    counts={"brokers": 3, "schedulers": 3, "users": 24},
    kill_every_s=2.0,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came of it, and return 0 when all is as it must be."""
    return _COMMAND_LINE.run(arguments, ChaosOptions, chaos, _tell)


def _tell(summary: Summary) -> None:
    for name in ("granted", "refused", "asked_again", "kills"):
        counts = getattr(summary, name)
        told = ", ".join(f"{key} {counts[key]}" for key in sorted(counts))
        print(f"{name.replace('_', ' ')}: {told or 'none'}")
    print(f"sandboxes: {summary.sandboxes}, of which {summary.died} died by themselves")
    print(f"revisions: {summary.revisions}, and {summary.unseen} replaced before they were read")
    tell_history(summary)


if __name__ == "__main__":
    configure_logging("chaos", level="error")
    sys.exit(main())
