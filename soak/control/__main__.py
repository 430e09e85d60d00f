"""Chaos in the control plane: ``python -m soak.control [--seed N] [--seconds N] [--json]``.

Brokers and schedulers are killed with SIGKILL at random while users ask for sandboxes, Compute
Units, gangs and leases on nodes that only pretend. On every card allocated + free stays all there
is, no slice is in two leases, no request is lost and none is granted twice, and in the end nothing
is held. It exits with 0 when that is so, with 1 when it is not, with 2 when nothing could be
started.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from typing import Final

import msgspec
import uvloop

from dsec_common.errors import DsecError
from dsec_common.logging import configure_logging
from soak.control.run import ChaosOptions, Summary, chaos

_SHOWN_MAX: Final = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came of it, and return 0 when all is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m soak.control", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, help="repeats the same choices (default: a random one)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=os.environ.get("CHAOS_SECONDS", "300"),
        help="how long to kill (default: CHAOS_SECONDS, or 300)",
    )
    parser.add_argument("--brokers", type=int, default=3, help="default %(default)s")
    parser.add_argument("--schedulers", type=int, default=3, help="default %(default)s")
    parser.add_argument("--users", type=int, default=24, help="at once (default %(default)s)")
    parser.add_argument(
        "--kill-every-s",
        type=float,
        default=2.0,
        help="on average (default %(default)s); 0 kills nothing",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    asked = parser.parse_args(arguments)
    counts = (asked.brokers, asked.schedulers, asked.users)
    if not asked.seconds > 0 or min(counts) < 1 or not asked.kill_every_s >= 0:
        parser.error(
            "seconds, brokers, schedulers and users are more than 0, and kill-every-s is 0 or more"
        )
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"chaos-control: seed {seed}, {asked.seconds:g} s", file=sys.stderr, flush=True)
    options = ChaosOptions(
        seed=seed,
        seconds=asked.seconds,
        brokers=asked.brokers,
        schedulers=asked.schedulers,
        users=asked.users,
        kill_every_s=asked.kill_every_s,
    )
    try:
        summary = uvloop.run(chaos(options))
    except DsecError as error:
        print(f"chaos-control: {error}", file=sys.stderr)
        return 2
    if asked.json:
        print(msgspec.json.encode(summary).decode())
    else:
        _tell(summary)
    return 0 if summary.clean else 1


def _tell(summary: Summary) -> None:
    for name in ("granted", "refused", "asked_again", "kills"):
        counts = getattr(summary, name)
        told = ", ".join(f"{key} {counts[key]}" for key in sorted(counts))
        print(f"{name.replace('_', ' ')}: {told or 'none'}")
    print(f"sandboxes: {summary.sandboxes}, of which {summary.died} died by themselves")
    print(f"revisions: {summary.revisions}, and {summary.unseen} replaced before they were read")
    if not summary.clean:
        print("history up to the first violation:")
        for line in summary.history:
            print(f"  {line}")
    for violation in summary.violations[:_SHOWN_MAX]:
        print(f"violation: {violation}")
    print(summary.line())


if __name__ == "__main__":
    configure_logging("chaos", level="error")
    sys.exit(main())
