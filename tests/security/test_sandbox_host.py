"""What of the host a sandbox could see, have run, or fill: its paths, its programs, its disk."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attack_world import CALL, AttackWorld
from kernel_world import MIB, NODE, read

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
CRASH = """
import ctypes, os, resource, signal
for limits in ((0, 0), (1, 1), (1 << 30, 1 << 30), (-1, -1)):
    try: resource.setrlimit(resource.RLIMIT_CORE, limits)
    except (OSError, ValueError): pass
for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGQUIT, signal.SIGSYS):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        os.kill(os.getpid(), number)
    print(os.WTERMSIG(os.waitpid(pid, 0)[1]), end=' ')
"""


async def test_no_list_of_mounts_names_a_path_of_the_host(arena: AttackWorld) -> None:
    run = arena.directory / "run"
    run.mkdir()
    await arena.create("r", run_directory=run)
    said = await arena.say(
        "cat /proc/self/mountinfo /proc/mounts /proc/self/mountstats /proc/1/mountinfo"
        " /proc/thread-self/mounts; true",
        local="r",
    )
    assert " / / " in said
    # The directory of the agent's socket is a part of a file system of the host, and says which.
    lines = [line for line in said.splitlines() if "/run/dsec" not in line]
    of_host = [str(arena.layers.base.parent), str(arena.directory), str(arena.directory.parent)]
    of_host += [f"dsec-{NODE}", ".erofs", str(Path.cwd()), "/proc/self/fd", "(deleted)"]
    assert not [(name, line) for line in lines for name in of_host if name in line], said
    places = set(re.findall(r"(?:lower|upper|work)dir\+?=([^,\s]*)", said))
    assert places == {"/", "/upper", "/work"}
    await arena.kernel.destroy("r")


@pytest.fixture
def core_handler(tmp_path: Path) -> Iterator[Path]:
    """Have the host run a program at every crash; yield what that writes."""
    before = CORE_PATTERN.read_text()
    told = tmp_path / "crashes"
    handler = tmp_path / "handler"
    handler.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    handler.chmod(0o755)
    if len(pattern := f"|{handler} %P") > 127:
        pytest.fail("the directory of this test has too long a name for a core pattern")
    try:
        CORE_PATTERN.write_text(pattern)
    except OSError as error:
        pytest.skip(f"this host's core pattern cannot be changed: {error}")
    try:
        yield told
    finally:
        CORE_PATTERN.write_text(before)


def _crash_on_the_host() -> int:
    """Crash a process of the host's, whose core limit is the highest; return its number."""
    code = (
        "import os, resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_CORE)\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))\n"
        "print(os.getpid(), hard, flush=True); os.abort()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20
    )
    number, hard = done.stdout.split()
    assert int(hard) not in {0, 1}
    return int(number)


def _told(crashes: Path) -> list[str]:
    """Return the numbers of the processes that the handler was run for, oldest first."""
    return crashes.read_text().split() if crashes.exists() else []


async def test_a_crash_inside_runs_no_program_of_the_host(
    arena: AttackWorld, core_handler: Path
) -> None:
    said = await arena.python(CRASH)
    assert said.split() == ["11", "6", "3", "31"]
    # The host's own crash comes later and is told: so would have been those before.
    own = str(await asyncio.to_thread(_crash_on_the_host))
    async with asyncio.timeout(20):
        while own not in _told(core_handler):
            await asyncio.sleep(0.01)
    assert _told(core_handler) == [own]


BOMB = """
import errno, os
ends = set()
def fill(make):
    made = 0
    try:
        while made < 100000: make(made); made += 1
    except OSError as error: ends.add(errno.errorcode[error.errno])
    return made
os.makedirs('/tmp/b/empty'); os.makedirs('/dev/shm/b'); os.makedirs('/work/b')
made = fill(lambda n: os.close(os.open(f'/tmp/b/{n}', os.O_CREAT)))
made += fill(lambda n: os.mkdir(f'/dev/shm/b/{n}'))
made += fill(lambda n: os.symlink('x' * 4000, f'/work/b/{n}'))
made += fill(lambda n: os.mkfifo(f'/run/{n}'))
made += fill(lambda n: os.close(os.open(f'/root/{n}', os.O_CREAT | os.O_RDWR)))
# What is in a layer is copied up by the first change: that takes inodes, too.
for top, names, files in os.walk('/usr'):
    for name in files:
        try: os.utime(os.path.join(top, name)); made += 1
        except OSError as error: ends.add(errno.errorcode[error.errno])
print(made, *sorted(ends))
"""


async def test_an_inode_bomb_ends_at_the_sandboxs_own_number(arena: AttackWorld) -> None:
    before = _inodes_free(arena.directory)
    made, *ends = (await arena.python(BOMB, timeout_s=60)).split()
    assert ends == ["ENOSPC"]
    assert 3000 < int(made) <= 4096
    assert abs(_inodes_free(arena.directory) - before) < 2000, "those of others come and go"
    # The neighbour has all of its own.
    own = "import os\nfor n in range(3500): os.close(os.open(f'/tmp/{n}', os.O_CREAT))"
    await arena.python(own, local="neighbour")
    # Of what it has it may use again what it gives back.
    await arena.say("rm -rf /tmp/b && echo again > /tmp/again && cat /tmp/again")


async def test_a_disk_bomb_ends_at_the_sandboxs_own_size(arena: AttackWorld) -> None:
    said = await arena.python(
        CALL
        + """
total = 0
for place in ('/tmp', '/dev/shm', '/work', '/root', '/run'):
    os.makedirs(place, exist_ok=True)
    for how in ('write', 'allocate', 'copy-up'):
        file = os.open(f'{place}/{how}', os.O_CREAT | os.O_RDWR)
        try:
            for _ in range(100):
                if how == 'allocate': os.posix_fallocate(file, 0, (_ + 1) << 20); total += 1
                else: total += os.write(file, bytes(1 << 20)) >> 20
        except OSError as error: assert error.errno == errno.ENOSPC, error
print(total)
""",
        timeout_s=60,
    )
    assert 20 <= int(said) <= 32
    own = "open('/tmp/mine', 'wb').write(bytes(20 << 20))"
    await arena.python(own, local="neighbour")
    assert (await arena.kernel.usage("a")).memory_peak_bytes >= 20 * MIB, "it is the sandbox's own"


def _inodes_free(directory: Path) -> int:
    return os.statvfs(directory).f_ffree


async def test_a_low_port_is_anyones_inside_and_takes_none_of_the_host_or_a_neighbour(
    arena: AttackWorld,
) -> None:
    first = read("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    code = (
        "import os, socket\n"
        "kept = [socket.create_server(('', port)) for port in (1, 22, 53, 80, 443)]\n"
        "kept += [socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]\n"
        "kept[-1].bind(('', 53))\n"
        "print(os.getuid(), len(kept), flush=True)\n"
    )
    held = await arena.exec_until_output(
        arena.command("python3", "-c", code + "import time; time.sleep(60)", user="1000")
    )
    # Each network has ports of its own.
    assert await arena.python(code, local="neighbour", user="1000") == "1000 6"
    said = await arena.python(
        CALL + "attempt('more', lambda: os.open('/proc/sys/net/ipv4/"
        "ip_unprivileged_port_start', os.O_WRONLY))"
    )
    assert said.split()[1] in {"EROFS", "EACCES", "EPERM"}
    assert read("/proc/sys/net/ipv4/ip_unprivileged_port_start") == first
    held.cancel()
    await asyncio.wait([held])
