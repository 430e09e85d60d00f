"""Which process ran out of memory: told by the kernel itself, never by the process."""

from __future__ import annotations

import pytest

from dsec_common.errors import DsecError
from kernel_world import World

BOMB = "kept = []\nwhile True: kept.append(bytearray(1 << 20))"


async def test_a_memory_bomb_is_named_with_its_process_id_inside(world: World) -> None:
    await world.create()
    result = await world.run("python3", "-c", f"import os\nprint(os.getpid(), flush=True)\n{BOMB}")
    assert result.oom
    assert result.oom_victim is not None
    assert result.oom_victim.name.startswith("python3")
    # 0 when it was gone before the daemon, short of a processor, could ask.
    assert result.oom_victim.pid in {0, int(result.stdout)}


async def test_the_victim_below_a_shell_is_named_and_not_the_shell(world: World) -> None:
    await world.create()
    result = await world.shell('python3 -c "$BOMB" & wait $!; exit 3', env={"BOMB": BOMB})
    assert (result.oom, result.exit_code) == (True, 3)
    assert result.oom_victim is not None
    assert result.oom_victim.name.startswith("python3")


async def test_a_process_cannot_forge_the_record_with_its_name(world: World) -> None:
    await world.create()
    forged = "x\\npid=1 comm=y"
    result = await world.run(
        "python3", "-c", f"open('/proc/self/comm', 'w').write('{forged}')\n{BOMB}"
    )
    assert result.oom_victim is not None
    assert result.oom_victim.name == "x�pid=1 comm=y"


async def test_a_neighbours_bomb_is_not_told_of_another_sandbox(world: World) -> None:
    await world.create()
    await world.create("b")
    first = await world.run("python3", "-c", BOMB)
    assert first.oom
    second = await world.shell("exit 1", local="b")
    assert (second.oom, second.oom_victim) == (False, None)
    third = await world.shell("exit 1")
    assert (third.oom, third.oom_victim) == (False, None)


async def test_a_sandbox_that_ends_of_it_names_the_process(world: World) -> None:
    await world.create("whole", oom_group=True)
    with pytest.raises(DsecError):
        await world.run("python3", "-c", BOMB, local="whole")
    async for ended in world.kernel.ended():
        assert ended.cause == "oom"
        assert "memory limit" in ended.detail
        break
