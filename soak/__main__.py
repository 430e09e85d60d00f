"""A soak: ``python -m soak [--seed N] [--seconds N] [--nodes N] [--users N] [--json]``.

A whole platform of several nodes is used at random while its parts are killed with SIGKILL; a
model says what must be true. At the end every sandbox that the SDK was told of must live or have
ended for a reason that was given, and nothing may be left. It exits with 0 when that is so, with 1
when it is not, with 2 when nothing could be started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from dsec_common.logging import configure_logging
from soak.command_line import CommandLine
from soak.run import SoakOptions, Summary, soak

_COMMAND_LINE: Final = CommandLine(
    program="python -m soak",
    name="soak",
    about=__doc__,
    seconds_from="SOAK_SECONDS",
    seconds=600,
    counts={"nodes": 2, "users": 8},
    kill_every_s=5.0,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print what came of it, and return 0 when all is as it must be."""
    return _COMMAND_LINE.run(arguments, SoakOptions, soak, _tell)


def _tell(summary: Summary) -> None:
    for name in ("operations", "refused", "kills"):
        counts = getattr(summary, name)
        print(f"{name}: " + ", ".join(f"{key} {counts[key]}" for key in sorted(counts)))
    for leak in summary.leaks:
        print(f"leak: {leak}")


if __name__ == "__main__":
    configure_logging("soak", level="error")
    sys.exit(main())
