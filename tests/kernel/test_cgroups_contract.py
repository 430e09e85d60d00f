"""What every cgroup backend promises, against this host's own trees."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cgroup_processes import (
    clone_into,
    ended,
    ending,
    enter,
    make_cgroup,
    next_ooms,
    read_line,
    readable,
    start,
    start_exec,
    v1_directories,
)
from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.cgroups import CgroupLimits, detect_layout, open_driver
from dsec_sandboxd.kernel.cgroups_tree import read_field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_sandboxd.kernel.cgroups import Cgroup, CgroupDriver

MIB = 1 << 20
LIMITS = CgroupLimits(memory_bytes=96 * MIB, cpus=1.5, pids=32)
NODE = f"contract-{os.getpid()}"
BASE_UID = 300_000

IDLE = "import sys\nprint('ready')\nsys.stdin.read()"
# Grows until the kernel steps in; the pages are written, so they count.
MEMORY_BOMB = """
import sys
sys.stdin.readline()
kept = []
while True:
    kept.append(bytearray(b'x' * (1 << 20)))
"""
# Prints the id of a grandchild with a session of its own, as a daemon has, then ends.
DAEMON = """
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(1)
        signal.pause()
    os._exit(0)
os.wait()
"""


def our_directories() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    return [*root.glob(f"dsec-{NODE}"), *root.glob(f"*/dsec-{NODE}")]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def exit_code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def memberships(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


@pytest.fixture
def driver() -> Iterator[CgroupDriver]:
    driver = open_driver(detect_layout(), NODE)
    yield driver
    left = driver.leftovers()
    for local in left:  # a failed test must not fail the next one
        driver.adopt(local).kill()
        driver.adopt(local).remove()
    driver.close()
    assert not left, "the test left sandboxes behind"
    assert not our_directories(), "the driver left its directories behind"


@pytest.fixture
async def cgroup(driver: CgroupDriver) -> Cgroup:
    return make_cgroup(driver, "sandbox", LIMITS)


async def end(cgroup: Cgroup) -> None:
    cgroup.kill()
    await cgroup.remove_when_empty()


def limits_in_force(cgroup: Cgroup) -> dict[str, str]:
    """Read back from the kernel, in the words of the tree that holds each limit."""
    layout = detect_layout()
    found = {}
    for name in IN_FORCE[layout.mode]:
        tree = layout.v1.get(name.partition(".")[0], layout.unified)
        found[name] = (tree / f"dsec-{NODE}" / cgroup.local / name).read_text().strip()
    return found


IN_FORCE = {
    "v2": {
        "memory.max": str(96 * MIB),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.weight": "150",
        "cpu.max": "max 100000",
        "pids.max": "32",
    },
    "hybrid": {
        "memory.limit_in_bytes": str(96 * MIB),
        "memory.memsw.limit_in_bytes": str(96 * MIB),
        "cpu.shares": "1536",
        "cpu.cfs_quota_us": "-1",
        "pids.max": "32",
    },
}
QUOTA_IN_FORCE = {
    "v2": {"cpu.max": "50000 100000", "cpu.weight": "50", "memory.oom.group": "0"},
    "hybrid": {"cpu.cfs_quota_us": "50000", "cpu.shares": "512"},
}


async def test_every_limit_is_in_force_in_the_kernel(cgroup: Cgroup) -> None:
    assert limits_in_force(cgroup) == IN_FORCE[detect_layout().mode]
    assert cgroup.remove()


async def test_a_quota_is_set_only_when_asked_for(driver: CgroupDriver) -> None:
    limits = CgroupLimits(
        memory_bytes=96 * MIB, cpus=0.5, pids=32, cpu_quota=True, end_all_on_oom=False
    )
    cgroup = make_cgroup(driver, "capped", limits)
    in_force = limits_in_force(cgroup)
    wanted = QUOTA_IN_FORCE[detect_layout().mode]
    assert {name: in_force[name] for name in wanted} == wanted
    assert cgroup.remove()


async def test_best_effort_is_the_kernels_idle_class(driver: CgroupDriver) -> None:
    layout = detect_layout()
    limits = CgroupLimits(memory_bytes=96 * MIB, cpus=2, pids=32, best_effort=True)
    cgroup = make_cgroup(driver, "idle", limits)
    tree = layout.v1.get("cpu", layout.unified)
    assert (tree / f"dsec-{NODE}" / "idle" / "cpu.idle").read_text().strip() == "1"
    # It has the least weight, and asking for another is refused while it is idle.
    weight = (
        tree / f"dsec-{NODE}" / "idle" / ("cpu.weight" if layout.mode == "v2" else "cpu.shares")
    )
    with pytest.raises(OSError, match="Invalid argument"):
        weight.write_text("1024")
    assert cgroup.remove()


async def test_a_process_enters_every_tree_by_itself(cgroup: Cgroup) -> None:
    process = start(cgroup, IDLE)
    with ending(process):
        assert read_line(process) == "ready"
        entered = memberships(process.pid)
        wanted = 1 + len(v1_directories(cgroup))
        assert entered.count(f"/dsec-{NODE}/sandbox") == wanted
        assert cgroup.processes() == [process.pid]
        assert cgroup.populated()
        await end(cgroup)


async def test_a_process_starts_directly_in_the_sandbox(cgroup: Cgroup) -> None:
    directory = os.open(cgroup.directory, os.O_RDONLY | os.O_DIRECTORY)
    child = clone_into(directory)
    if child == 0:
        signal.pause()
        os._exit(0)
    os.close(directory)
    assert cgroup.processes() == [child]
    cgroup.kill()
    assert exit_code_of(child) == -signal.SIGKILL
    await cgroup.remove_when_empty()


async def test_memory_that_runs_out_ends_the_whole_sandbox_and_is_told(
    driver: CgroupDriver, cgroup: Cgroup
) -> None:
    bomb, bystander = start(cgroup, MEMORY_BOMB), start(cgroup, IDLE)
    with ending(bomb, bystander):
        assert read_line(bystander) == "ready"
        assert bomb.stdin is not None
        bomb.stdin.write("go\n")
        bomb.stdin.flush()
        assert await next_ooms(driver) == ["sandbox"]
        assert await ended(bomb) == -signal.SIGKILL
        assert await ended(bystander) == -signal.SIGKILL
        assert cgroup.oom_kills() >= 1
        assert 90 * MIB < cgroup.memory_bytes_peak() <= 96 * MIB
        await end(cgroup)
    assert driver.read_ooms() == []


async def test_memory_that_runs_out_ends_one_process_when_so_asked(driver: CgroupDriver) -> None:
    limits = CgroupLimits(memory_bytes=96 * MIB, cpus=1, pids=32, end_all_on_oom=False)
    cgroup = make_cgroup(driver, "lenient", limits)
    bomb, bystander = start(cgroup, MEMORY_BOMB), start(cgroup, IDLE)
    with ending(bomb, bystander):
        assert read_line(bystander) == "ready"
        assert bomb.stdin is not None
        bomb.stdin.write("go\n")
        bomb.stdin.flush()
        assert await next_ooms(driver) == ["lenient"]
        assert await ended(bomb) == -signal.SIGKILL
        assert cgroup.processes() == [bystander.pid]
        await end(cgroup)


async def test_an_adopted_sandbox_can_be_watched_again(driver: CgroupDriver) -> None:
    cgroup = make_cgroup(driver, "older", LIMITS)
    bomb = start(cgroup, MEMORY_BOMB)
    with ending(bomb):
        later = open_driver(detect_layout(), NODE)
        adopted = later.adopt("older")
        adopted.watch_oom()
        assert bomb.stdin is not None
        bomb.stdin.write("go\n")
        bomb.stdin.flush()
        assert await next_ooms(later) == ["older"]
        assert await ended(bomb) == -signal.SIGKILL
        await adopted.remove_when_empty()
        later.close()
        assert cgroup.remove()


async def test_the_pids_limit_stops_a_fork_bomb(driver: CgroupDriver) -> None:
    cgroup = make_cgroup(driver, "forks", CgroupLimits(memory_bytes=96 * MIB, cpus=1, pids=4))
    script = (
        "import os, signal\nmade = 0\ntry:\n  while True:\n    if os.fork() == 0: signal.pause()\n"
        "    made += 1\nexcept BlockingIOError: print(made)\nsignal.pause()"
    )
    process = start(cgroup, script)
    with ending(process):
        assert read_line(process) == "3"
        assert cgroup.pids_current() == 4
        assert len(cgroup.processes()) == 4
        await end(cgroup)


async def test_usage_is_counted(cgroup: Cgroup) -> None:
    script = (
        "import sys, time\nkept = bytearray(b'x' * (32 << 20))\nend = time.process_time() + 0.1\n"
        "while time.process_time() < end: pass\nprint('ready')\nsys.stdin.read()"
    )
    process = start(cgroup, script)
    with ending(process):
        assert read_line(process) == "ready"
        assert 32 * MIB < cgroup.memory_bytes_current() < 96 * MIB
        assert cgroup.memory_bytes_peak() >= cgroup.memory_bytes_current() - MIB
        assert 0.1 <= cgroup.cpu_usage_s() < 10
        assert cgroup.pids_current() == 1
        assert cgroup.oom_kills() == 0
        await end(cgroup)


async def test_killing_a_command_reaches_its_daemons_and_nothing_else(cgroup: Cgroup) -> None:
    directory = cgroup.create_exec("7")
    bystander, command = start(cgroup, IDLE), start_exec(cgroup, directory, DAEMON)
    os.close(directory)
    with ending(bystander, command):
        daemon = int(read_line(command))
        assert await ended(command) == 0
        assert cgroup.exec_processes("7") == [daemon]
        assert cgroup.exec_populated("7")
        assert not cgroup.remove_exec("7"), "a command that still runs was removed"
        pidfd = os.pidfd_open(daemon)
        cgroup.kill_exec("7")
        await readable(pidfd)
        os.close(pidfd)
        assert not cgroup.exec_populated("7")
        assert cgroup.remove_exec("7")
        assert read_line(bystander) == "ready"
        assert bystander.poll() is None
        await end(cgroup)


async def test_a_command_that_is_stopped_stands_still_while_the_sandbox_runs_on(
    cgroup: Cgroup,
) -> None:
    directory = cgroup.create_exec("7")
    bystander, command = start(cgroup, IDLE), start_exec(cgroup, directory, IDLE)
    os.close(directory)
    with ending(bystander, command):
        assert read_line(command) == "ready"
        await cgroup.freeze()
        cgroup.stop_exec("7")
        cgroup.thaw()
        assert cgroup.exec_stopped("7")
        assert read_line(bystander) == "ready"
        events = f"{cgroup.directory}/exec-7/cgroup.events"
        async with asyncio.timeout(10):  # the kernel tells it a few milliseconds late
            while read_field(events, b"frozen") != 1:
                await asyncio.sleep(0.001)
        cgroup.let_exec_go("7")
        assert not cgroup.exec_stopped("7")
        await end(cgroup)


async def test_processes_of_commands_belong_to_the_sandbox(cgroup: Cgroup) -> None:
    directory = cgroup.create_exec("1")
    command = start_exec(cgroup, directory, IDLE)
    os.close(directory)
    with ending(command):
        assert read_line(command) == "ready"
        assert cgroup.processes() == [command.pid]
        assert not cgroup.remove(), "a sandbox with a running command was removed"
        cgroup.kill()
        assert await ended(command) == -signal.SIGKILL
        await cgroup.remove_when_empty()


async def test_a_gone_command_is_empty_and_may_be_ended_twice(cgroup: Cgroup) -> None:
    cgroup.kill_exec("never")
    cgroup.stop_exec("never")
    cgroup.let_exec_go("never")
    assert not cgroup.exec_stopped("never")
    assert cgroup.exec_processes("never") == []
    assert not cgroup.exec_populated("never")
    assert cgroup.remove_exec("never")
    assert cgroup.remove()


async def test_an_exec_id_in_use_is_a_conflict(cgroup: Cgroup) -> None:
    os.close(cgroup.create_exec("1"))
    with pytest.raises(DsecError) as caught:
        cgroup.create_exec("1")
    assert caught.value.code is ErrorCode.CONFLICT
    assert cgroup.remove()
    with pytest.raises(DsecError) as caught:
        cgroup.create_exec("2")
    assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("delegated", [True, False])
async def test_only_a_delegated_user_starts_commands(cgroup: Cgroup, *, delegated: bool) -> None:
    if delegated:
        cgroup.delegate_exec(BASE_UID)
    directory = cgroup.create_exec("1")
    child = os.fork()
    if child == 0:
        os._exit(_start_as_base_user(cgroup, directory))
    os.close(directory)
    code = exit_code_of(child)
    assert code == (0 if delegated else 13)
    await end(cgroup)


async def test_a_delegated_user_cannot_raise_a_limit(cgroup: Cgroup) -> None:
    cgroup.delegate_exec(BASE_UID)
    directory = os.open(cgroup.directory, os.O_RDONLY)
    child = os.fork()
    if child == 0:
        os.setresuid(BASE_UID, BASE_UID, BASE_UID)
        names = [entry.name for entry in os.scandir(directory) if entry.is_file()]
        writable = [name for name in names if os.access(name, os.W_OK, dir_fd=directory)]
        os._exit(0 if writable == ["cgroup.procs"] else 1)
    os.close(directory)
    assert exit_code_of(child) == 0
    await end(cgroup)


async def test_a_frozen_sandbox_stands_still_until_thawed(cgroup: Cgroup) -> None:
    echo = "import sys\nfor line in sys.stdin: print(line, end='')"
    process = start(cgroup, echo)
    with ending(process):
        assert process.stdin is not None
        await cgroup.freeze()
        used = cgroup.cpu_usage_s()
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert cgroup.cpu_usage_s() == used
        cgroup.thaw()
        assert read_line(process) == "hello"
        await end(cgroup)


async def test_a_frozen_sandbox_can_be_killed(cgroup: Cgroup) -> None:
    process = start(cgroup, IDLE)
    with ending(process):
        await cgroup.freeze()
        cgroup.kill()
        assert await ended(process) == -signal.SIGKILL
        await cgroup.remove_when_empty()


async def test_freezing_a_gone_sandbox_is_not_found(cgroup: Cgroup) -> None:
    assert cgroup.remove()
    with pytest.raises(DsecError) as caught:
        await cgroup.freeze()
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_removal_waits_for_the_last_process(cgroup: Cgroup) -> None:
    process = start(cgroup, IDLE)
    with ending(process):
        assert not cgroup.remove()
        with pytest.raises(DsecError) as caught:
            await cgroup.remove_when_empty(timeout_s=0.02)
        assert caught.value.code is ErrorCode.TIMEOUT
        cgroup.kill()
        assert await ended(process) == -signal.SIGKILL
        await cgroup.remove_when_empty()
    assert cgroup.remove()
    cgroup.kill()
    assert cgroup.processes() == []
    assert not cgroup.populated()


async def test_a_new_driver_finds_and_ends_what_a_crash_left(driver: CgroupDriver) -> None:
    crashed = open_driver(detect_layout(), NODE)
    cgroup = make_cgroup(crashed, "orphan", LIMITS)
    process = start(cgroup, IDLE)
    make_cgroup(crashed, "empty", LIMITS)
    with ending(process):
        assert driver.leftovers() == ["empty", "orphan"]
        orphan = driver.adopt("orphan")
        assert orphan.processes() == [process.pid]
        orphan.kill()
        assert await ended(process) == -signal.SIGKILL
        await orphan.remove_when_empty()
        await driver.adopt("empty").remove_when_empty()
    assert driver.leftovers() == []
    crashed.adopt("orphan").remove()
    crashed.close()


def test_a_living_sandbox_holds_at_most_one_descriptor(driver: CgroupDriver) -> None:
    before = open_descriptors()
    cgroups = [make_cgroup(driver, f"s{number}", LIMITS) for number in range(50)]
    assert open_descriptors() - before <= 50
    assert all(cgroup.remove() for cgroup in cgroups)


def test_parents_that_cannot_all_be_opened_leave_none_open(driver: CgroupDriver) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    for spare in range(len(driver.parents())):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor() + spare, limits[1]))
        try:
            with pytest.raises(DsecError) as caught:
                driver.parent_fds()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.code is ErrorCode.EXHAUSTED, spare
        assert open_descriptors() == before
    assert len(driver.parent_fds()) == len(driver.parents())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a b", "a.b", "-a", "*", "x" * 65])
def test_a_name_that_could_leave_its_directory_is_invalid(driver: CgroupDriver, name: str) -> None:
    with pytest.raises(DsecError) as caught:
        driver.adopt(name)
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError) as caught:
        driver.adopt("sandbox").kill_exec(name)
    assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError) as caught:
        open_driver(detect_layout(), name)
    assert caught.value.code is ErrorCode.INVALID


def _start_as_base_user(cgroup: Cgroup, directory_fd: int) -> int:
    """Start an empty command as PID 1 would; return 0, or the errno that refused it."""
    try:
        enter(cgroup, Path(cgroup.directory))
        os.setresuid(BASE_UID, BASE_UID, BASE_UID)
        child = clone_into(directory_fd)
        if child == 0:
            os._exit(0 if "/exec-1" in memberships(os.getpid()) else 99)
        return exit_code_of(child)
    except OSError as error:
        return error.errno or 98
