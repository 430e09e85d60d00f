"""Locks on ranges of files, which the kernel neither limits nor charges to anybody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from attack_world import AttackWorld
from dsec_common.errors import DsecError
from dsec_sandboxd.kernel.file_locks import NODE_LOCKS_MAX
from dsec_sandboxd.kernel.interface import EndCause, SandboxEnded

LOCKS = "/attack/locks"


def room_for_locks() -> int:
    return int(Path("/sys/kernel/slab/file_lock_cache/total_objects").read_text().split()[0])


async def next_end(arena: AttackWorld) -> SandboxEnded:
    async with asyncio.timeout(60):
        return await anext(arena.kernel.ended())


@pytest.mark.parametrize("how", ["process", "children", "thread"])
async def test_who_takes_locks_without_end_is_ended_for_it(arena: AttackWorld, how: str) -> None:
    running = asyncio.create_task(arena.kernel.exec("a", arena.command(LOCKS, how)))
    ended = await next_end(arena)
    assert (ended.local, ended.cause) == ("a", EndCause.EXHAUSTED)
    assert "locks" in ended.detail
    with pytest.raises(DsecError):
        await running
    assert room_for_locks() < NODE_LOCKS_MAX  # they were given back with it
    await arena.create("a")


async def test_locks_that_outlive_the_process_that_took_them_are_refused(
    arena: AttackWorld,
) -> None:
    result = await arena.kernel.exec("a", arena.command(LOCKS, "description"))
    assert result.stdout == b"Invalid argument\n" * 2
