"""A soak: ``python -m soak [--seed N] [--seconds N] [--nodes N] [--users N] [--json]``.

A whole platform of several nodes is used at random while its parts are killed with SIGKILL; a
model says what must be true. At the end every sandbox that the SDK was told of must live or have
ended for a reason that was given, and nothing may be left. It exits with 0 when that is so, with 1
when it is not, with 2 when nothing could be started.
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
from soak.run import SoakOptions, Summary, soak

_SHOWN_MAX: Final = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print what came of it, and return 0 when all is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, help="repeats the same choices (default: a random one)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=os.environ.get("SOAK_SECONDS", "600"),
        help="how long to use it (default: SOAK_SECONDS, or 600)",
    )
    parser.add_argument("--nodes", type=int, default=2, help="default %(default)s")
    parser.add_argument("--users", type=int, default=8, help="at once (default %(default)s)")
    parser.add_argument(
        "--kill-every-s",
        type=float,
        default=5.0,
        help="on average (default %(default)s); 0 kills nothing",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    asked = parser.parse_args(arguments)
    if not asked.seconds > 0 or asked.nodes < 1 or asked.users < 1 or not asked.kill_every_s >= 0:
        parser.error("seconds, nodes and users are more than 0, and kill-every-s is 0 or more")
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"soak: seed {seed}, {asked.seconds:g} s", file=sys.stderr, flush=True)
    options = SoakOptions(
        seed=seed,
        seconds=asked.seconds,
        nodes=asked.nodes,
        users=asked.users,
        kill_every_s=asked.kill_every_s,
    )
    try:
        summary = uvloop.run(soak(options))
    except DsecError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    if asked.json:
        print(msgspec.json.encode(summary).decode())
    else:
        _tell(summary)
    return 0 if summary.clean else 1


def _tell(summary: Summary) -> None:
    for name in ("operations", "refused", "kills"):
        counts = getattr(summary, name)
        print(f"{name}: " + ", ".join(f"{key} {counts[key]}" for key in sorted(counts)))
    for leak in summary.leaks:
        print(f"leak: {leak}")
    for violation in summary.violations[:_SHOWN_MAX]:
        print(f"violation: {violation}")
    print(summary.line())


if __name__ == "__main__":
    configure_logging("soak", level="error")
    sys.exit(main())
