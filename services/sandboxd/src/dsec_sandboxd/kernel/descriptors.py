"""How many of the daemon's descriptors the commands of one sandbox may take.

All sandboxes share what one process may have open, and a command takes up to eight. So the commands
of one sandbox hold at most as much as they leave to all others: whoever takes all it can finds half
of it gone, the next one half of the rest, and one that runs nothing may always begin something.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from dsec_common.errors import DsecError, ErrorCode

COMMAND_DESCRIPTORS: Final = 8
"""What a started command takes at most: its pipes, its logs, its input, its cgroup."""
COMMAND_DESCRIPTORS_RESERVED: Final = 512
"""What commands leave to everything else, or an eighth of all where there are few."""


def check_room(running: int, some_descriptor: int) -> None:
    """Return if a sandbox in which ``running`` commands run may begin another.

    Args:
        running: of this sandbox.
        some_descriptor: any one that is open; it is only copied.

    Raises:
        DsecError: ``exhausted``.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.dup(some_descriptor)
    except OSError:
        lowest = limit
    else:
        os.close(lowest)
    # The kernel hands out the lowest number that is free, so all below it are taken.
    if not may_begin(running, limit - lowest, limit):
        raise DsecError(
            ErrorCode.EXHAUSTED,
            f"{running} commands run in this sandbox, and the node's daemon has no descriptors for "
            "more; wait for one to end, or run them in sandboxes on other nodes",
            details={"what": "descriptors"},
        )


def may_begin(running: int, free: int, limit: int) -> bool:
    """Return whether ``running`` commands and another take no more than they leave free.

    Args:
        running: commands of one sandbox.
        free: descriptors that the process may still open.
        limit: how many it may have open in all.
    """
    reserved = min(COMMAND_DESCRIPTORS_RESERVED, limit // 8)
    if running == 0:
        return free >= reserved // 4
    return (running + 1) * COMMAND_DESCRIPTORS <= free - reserved
