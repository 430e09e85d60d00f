"""A node whose kernel fails at one call, for tests that nothing is left whichever it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dsec_common.errors import DsecError, ErrorCode, unavailable
from node_world import NOTHING, World

FAILURES: list[Any] = [
    unavailable("the spawner died while it worked"),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("a defect"),
]
#: More than a life takes; the test says so when it is not.
CALLS_MAX = 60


@asynccontextmanager
async def new_world(directory: Path, kind: Callable[[Path], World] = World) -> AsyncIterator[World]:
    """Yield a node that runs; nothing may be left of it."""
    directory.mkdir()  # noqa: ASYNC240  a tmpfs or as quick
    world = kind(directory)
    await world.start()
    try:
        yield world
    finally:
        await world.stop()
        assert world.left() == NOTHING
        world.directories.close()
        world.memory.cleanup()


async def attempt(work: Awaitable[Any]) -> object:
    """Return what some work came to; a defect of the kernel is made typed by the bus."""
    try:
        return await work
    except (DsecError, OSError, RuntimeError) as error:
        return error


async def delete_until_gone(world: World, local: str) -> None:
    """Delete as a patient user does; what was never made cannot be deleted."""
    for _ in range(20):
        outcome = await attempt(world.delete(local))
        if not isinstance(outcome, Exception):
            return
        assert isinstance(outcome, DsecError)
        if outcome.code is ErrorCode.NOT_FOUND:
            return
        assert outcome.retryable, outcome
        await asyncio.sleep(0.02)
    raise AssertionError(f"{local} does not go")


async def fail_each_call(
    directory: Path,
    failure: BaseException,
    live: Callable[[Any], Awaitable[None]],
    kind: Callable[[Path], World] = World,
) -> set[str]:
    """Live once for each call of the kernel that it takes, with that one failing.

    Nothing may be left of any life, and the node goes on.

    Args:
        directory: for the nodes.
        failure: what the kernel fails with.
        live: uses a node, and gives back all that it was given.
        kind: makes a node.

    Returns:
        The names of the calls that failed.
    """
    reached: set[str] = set()
    for nth in range(1, CALLS_MAX):
        async with new_world(directory / str(nth), kind) as world:
            before = len(world.kernel.calls)
            world.kernel.fail_call(nth, failure.with_traceback(None))
            await live(world)
            world.kernel.fail_none()
            if len(world.kernel.calls) < before + nth:
                return reached  # the life was over before that call
            reached.add(world.kernel.calls[before + nth - 1].name)
            assert world.left() == NOTHING, [call.name for call in world.kernel.calls[before:]]
            # The next sandbox is as good as any.
            assert (await world.place("next")).sandbox_id == "n1.next"
            await delete_until_gone(world, "next")
    raise AssertionError("a life takes more calls than CALLS_MAX")
