"""Limits hold, and say so."""

from __future__ import annotations

import asyncio

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import OpenMode
from kernel_world import MIB, World

EAT = "kept = []\nwhile True: kept.append(bytearray(1 << 20))"


async def test_a_memory_bomb_is_reported_and_the_sandbox_lives_on(world: World) -> None:
    await world.create("a")
    await world.create("b")
    result = await world.run("python3", "-c", EAT)
    assert result.oom
    assert result.signal == 9
    assert await world.say("echo alive") == "alive"
    assert await world.say("echo neighbour", local="b") == "neighbour"
    failing = await world.shell("exit 1")
    assert not failing.oom


async def test_a_memory_bomb_below_a_shell_is_reported_too(world: World) -> None:
    await world.create()
    result = await world.shell(f"python3 -c '{EAT}'; exit 5")
    assert result.oom
    assert result.exit_code == 5


async def test_a_fork_bomb_is_stopped_by_the_process_limit(world: World) -> None:
    await world.create(pids=20)
    result = await world.shell(
        "i=0; while [ $i -lt 60 ]; do sleep 100 & i=$((i+1)); done; echo end"
    )
    assert b"end" not in result.stdout or b"fork" in result.stderr
    assert (await world.kernel.usage("a")).pids <= 20
    await world.kernel.destroy("a")
    await world.create()
    assert await world.say("echo alive") == "alive"


async def test_the_writable_layer_is_full_at_its_size(world: World) -> None:
    await world.create(disk_bytes=8 * MIB)
    result = await world.shell("head -c 20000000 /dev/zero > /tmp/big")
    assert result.exit_code != 0
    assert b"No space left" in result.stderr
    await world.say("rm /tmp/big; echo small > /tmp/small")
    # /dev/shm is the same layer: it does not add to it.
    assert (await world.shell("head -c 20000000 /dev/zero > /dev/shm/big")).exit_code != 0


async def test_files_are_limited_in_number(world: World) -> None:
    await world.create(inodes=100)
    result = await world.python(
        "made = 0\n"
        "try:\n"
        "    while made < 500: open(f'/tmp/{made}', 'w').close(); made += 1\n"
        "except OSError as error: print(error.errno)\n"
        "print(made)"
    )
    number, made = result.split()
    assert number == "28"
    assert 80 <= int(made) <= 116


async def test_a_full_disk_is_told_to_a_writer_through_the_daemon(world: World) -> None:
    await world.create(inodes=50)
    await world.python(
        "import itertools\n"
        "try:\n"
        "    for n in itertools.count(): open(f'/tmp/{n}', 'w').close()\n"
        "except OSError: pass"
    )
    with pytest.raises(DsecError) as caught:
        await world.kernel.open_file("a", "/tmp/one-more", OpenMode.WRITE)
    assert caught.value.code is ErrorCode.EXHAUSTED


async def test_a_memory_bomb_of_many_processes_says_oom_and_leaves_init_alive(
    world: World,
) -> None:
    await world.create(memory_bytes=64 * MIB, disk_bytes=16 * MIB)
    # The shell fails with the first of them; those that the kernel ended are larger than it is.
    text = (
        'for i in 1 2 3 4; do python3 -c \'x = b"x" * (50 << 20)\' & pids="$pids $!"; done;'
        "for pid in $pids; do wait $pid || failed=1; done; exit ${failed:-0}"
    )
    init = world.init_pid()
    results = await asyncio.gather(*(world.shell(text) for _ in range(2)))
    assert any(result.oom for result in results), results
    assert all(result.oom or result.exit_code == 0 for result in results), results
    assert await world.say("echo alive") == "alive"
    assert world.init_pid() == init


async def test_the_smallest_sandbox_runs_a_command(world: World) -> None:
    await world.create(memory_bytes=4 * MIB, disk_bytes=64 * 1024, inodes=1, pids=2)
    assert (await world.run("true")).exit_code == 0
