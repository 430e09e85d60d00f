"""Keeping an agent's state consistent with what it depends on.

The decision is :func:`dsec_common.compute.consistency.judge`. An agent that is behind stands still
while it is synchronised, since what it would do meanwhile it would do on what is not so any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import structlog

from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS, judge
from dsec_common.errors import DsecError

log = structlog.get_logger()


class Agent(Protocol):
    """Whose state is kept consistent. Each step is done when it returns, and may be repeated."""

    async def pause(self, reason: str) -> None:
        """Have the agent stand still, with the reason in its log."""
        ...

    async def synchronise(self, version_ms: int) -> None:
        """Bring its state up to its dependencies' newest, as ``version_ms``; it stands still."""
        ...

    async def resume(self) -> None:
        """Have it go on."""
        ...


async def keep_consistent(
    agent: Agent,
    version_ms: int,
    dependencies: Mapping[str, int],
    clock_tolerance_ms: int = CLOCK_TOLERANCE_MS,
) -> int:
    """Return the agent's version, after it has been synchronised if it was behind.

    An agent that is consistent is not touched. One that could not be synchronised is left standing
    still: it must not go on, and is not tried again blindly.

    Args:
        agent: whose state it is.
        version_ms: its version.
        dependencies: the versions of all that it depends on, by name.
        clock_tolerance_ms: how far the clocks of all of them may be apart.

    Raises:
        DsecError: what failed.
    """
    behind = judge(version_ms, dependencies, clock_tolerance_ms)
    if behind is None:
        return version_ms
    await agent.pause(behind.reason)
    try:
        await agent.synchronise(behind.required_ms)
    except DsecError as error:
        log.warning("an agent stands still", reason=behind.reason, error=str(error))
        raise
    await agent.resume()
    return behind.required_ms
