"""CPU classes: best effort runs on what the others leave, and nothing inside undoes it."""

from __future__ import annotations

import asyncio
import ctypes
import os

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.cgroups_layout import detect_layout
from dsec_sandboxd.kernel.init import is_sandbox_over
from dsec_sandboxd.kernel.interface import CommandSpec
from dsec_sandboxd.kernel.probe import read_facts
from kernel_world import MIB, World

SCHED_OTHER, SCHED_IDLE = 0, 5
#: Twice as many busy processes as processors, for a time, said once all run.
BURN = """
import os, sys, time
ready, tell = os.pipe()
for _ in range(2 * os.cpu_count()):
    if os.fork() == 0:
        os.write(tell, b'x')
        end = time.monotonic() + float(sys.argv[1])
        while time.monotonic() < end: pass
        os._exit(0)
for _ in range(2 * os.cpu_count()): os.read(ready, 1)
print('burning', flush=True)
for _ in range(2 * os.cpu_count()): os.wait()
"""


async def test_every_process_of_a_best_effort_sandbox_is_idle_class_from_the_first_on(
    world: World,
) -> None:
    await world.create("idle", best_effort=True)
    assert os.sched_getscheduler(world.init_pid("idle")) == SCHED_IDLE
    code = "import os\nprint(os.sched_getscheduler(0), os.sched_getscheduler(1))"
    assert await world.python(code, local="idle") == f"{SCHED_IDLE} {SCHED_IDLE}"
    await world.create("usual")
    assert await world.python(code, local="usual") == f"{SCHED_OTHER} {SCHED_OTHER}"


async def test_nothing_inside_leaves_the_idle_class_or_raises_its_priority(world: World) -> None:
    await world.create("idle", best_effort=True)
    said = await world.python(
        """
import errno, os, resource
def attempt(what, action):
    try: action(); print(what, 'done')
    except (OSError, ValueError) as error: print(what, getattr(error, 'errno', None) or error)
for policy in (os.SCHED_OTHER, os.SCHED_BATCH):
    attempt(policy, lambda: os.sched_setscheduler(0, policy, os.sched_param(0)))
attempt('rt', lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)))
attempt('nice', lambda: os.setpriority(os.PRIO_PROCESS, 0, -1))
attempt('limit', lambda: resource.setrlimit(resource.RLIMIT_NICE, (40, 40)))
os.fork()
print(os.sched_getscheduler(0))
""",
        local="idle",
    )
    assert "done" not in said, said
    assert said.split()[-1] == str(SCHED_IDLE)


@pytest.mark.alone
async def test_under_contention_the_latency_sensitive_get_nearly_everything(world: World) -> None:
    await world.create("idle", best_effort=True, cpus=8.0)
    await world.create("prompt", cpus=1.0)
    burning = asyncio.Event()
    endless = CommandSpec(argv=("python3", "-c", BURN, "60"))
    background = asyncio.create_task(
        world.kernel.exec("idle", endless, lambda _stream, _data: burning.set())
    )
    async with asyncio.timeout(30):
        await burning.wait()
    before = (await world.kernel.usage("idle")).cpu_s
    await world.run("python3", "-c", BURN, "1.5", local="prompt")
    idle = (await world.kernel.usage("idle")).cpu_s - before
    prompt = (await world.kernel.usage("prompt")).cpu_s
    background.cancel()
    await asyncio.wait([background])
    # By their cpus alone the other would have had eight times as much.
    assert idle * 4 < prompt, (idle, prompt)


def _has_core_scheduling() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(62, 0, 0, 0, ctypes.byref(ctypes.c_ulong()))) == 0


async def test_core_scheduling_is_in_force_or_refused_before_anything_starts(world: World) -> None:
    facts = read_facts(detect_layout())
    assert ("core_scheduling" in facts.missing) is not _has_core_scheduling()
    if _has_core_scheduling():
        await world.create("apart", core_scheduling=True)
        cookie = ctypes.c_ulong()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(62, 0, world.init_pid("apart"), 0, ctypes.byref(cookie)) == 0
        assert cookie.value
        return
    with pytest.raises(DsecError) as caught:
        await world.create("apart", core_scheduling=True)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.details["missing"] == "core_scheduling"
    assert not world.cgroup("apart").exists()


async def test_with_oom_group_the_whole_sandbox_ends_of_one_memory_bomb(world: World) -> None:
    await world.create("whole", oom_group=True, memory_bytes=64 * MIB)
    with pytest.raises(DsecError) as caught:
        await world.run(
            "python3", "-c", "kept = []\nwhile True: kept.append(bytearray(1 << 20))", local="whole"
        )
    assert is_sandbox_over(caught.value)  # why is told with the end: the daemon puts them together
    async for ended in world.kernel.ended():
        assert (ended.local, ended.cause) == ("whole", "oom")
        break
