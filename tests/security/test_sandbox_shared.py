"""What all sandboxes share: whoever takes it or listens to it gets nothing of the others."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct

import pytest

from attack_world import CALL, AttackWorld
from dsec_sandboxd.kernel.host_limits import LEAST
from kernel_world import MIB, read

WATCH = """
import ctypes, os, select, struct
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0)
for path in (b'/dev', b'/dev/null', b'/dev/zero', b'/dev/pts', b'/dev/shm', b'/proc/cmdline',
             b'/proc/keys', b'/proc/cpuinfo', b'/etc/passwd', b'/bin/sh', b'/run', b'/proc/sys'):
    libc.inotify_add_watch(watch, path, 0xfff)
os.write(1, b'ready')
print(len(os.read(watch, 65536)) if select.select([watch], [], [], 3)[0] else 'silence')
"""
TOUCH = """
cat /dev/null /dev/zero /proc/cmdline /proc/keys /proc/cpuinfo /etc/passwd | head -c 9 > /dev/null
ls /dev /dev/pts /dev/shm /run /proc/sys > /dev/null; echo x > /dev/shm/x
"""


async def test_a_watch_on_devices_masks_and_layers_tells_nothing_of_a_neighbour(
    arena: AttackWorld,
) -> None:
    printed = asyncio.Event()
    running = asyncio.create_task(
        arena.kernel.exec(
            "a",
            arena.command("python3", "-c", WATCH),
            lambda _stream, _data: printed.set(),
        )
    )
    async with asyncio.timeout(10):
        await printed.wait()
    for _ in range(3):
        await arena.shell(TOUCH, local="neighbour")
    assert (await running).stdout == b"readysilence\n"


async def test_a_lock_on_a_device_is_no_lock_for_a_neighbour(arena: AttackWorld) -> None:
    lock = (
        "import fcntl, os, sys, time\n"
        "fcntl.flock(os.open('/dev/null', 0), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print('locked', flush=True); time.sleep(float(sys.argv[1]))"
    )
    holding = await arena.exec_until_output(arena.command("python3", "-c", lock, "60"))
    said = await arena.run("python3", "-c", lock, "0", local="neighbour")
    assert said.stdout == b"locked\n"
    holding.cancel()
    await asyncio.wait([holding])


async def test_no_program_of_a_sandbox_takes_from_the_budget_for_filters(
    arena: AttackWorld,
) -> None:
    # With filters of their own, a thousand processes use up bpf_jit_limit, and nothing starts.
    said = await arena.python(
        CALL
        + """
import struct
filter = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
class Program(ctypes.Structure): _fields_ = [('n', ctypes.c_ushort), ('p', ctypes.c_void_p)]
program = Program(1, ctypes.addressof(filter))
print(call(317, 1, 0, ctypes.byref(program)), call(157, 22, 2, ctypes.byref(program)))
print(call(157, 22, 1), call(317, 1, 8, ctypes.byref(program)))
print(call(317, 2, 0, struct.pack('I', 0)))
"""
    )
    # What kinds of filters the kernel knows may still be asked.
    assert said.split() == ["EINVAL"] * 4 + ["done"]


@pytest.mark.alone
async def test_the_hosts_table_of_files_has_no_end_that_a_sandbox_could_reach(
    arena: AttackWorld,
) -> None:
    for name, least in LEAST.items():
        assert int(read(f"/proc/sys/{name}")) >= least, name
    # Every descriptor is charged (how much is measured beside): what ends is its own memory.
    code = """
import os, resource, sys, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
told, tell = os.pipe()
for _ in range(40):
    if os.fork() == 0:
        count = 0
        try:
            while count < 12000: os.open('/dev/null', 0); count += 1
        except OSError: pass
        os.write(tell, b'%9d' % count); time.sleep(60)
print(sum(int(os.read(told, 9)) for _ in range(40)), flush=True); time.sleep(60)
"""
    in_use = int(read("/proc/sys/fs/file-nr").split()[0])
    async with arena.holding(code) as said:
        if said:
            assert int(read("/proc/sys/fs/file-nr").split()[0]) - in_use > int(said) * 0.9
        else:  # its memory was used up
            assert (await arena.kernel.usage("a")).memory_peak_bytes > 120 * MIB
        beside = "import os\nfor _ in range(1000): os.open('/dev/null', 0)"
        await arena.python(beside, local="neighbour")


HOARDS = {
    "posix timers": """
def make():
    identifier = ctypes.c_int()
    if libc.timer_create(1, None, ctypes.byref(identifier)): raise OSError(ctypes.get_errno(), '')
""",
    "message queues": """
def make(count=[0]):
    count[0] += 1
    name = b'/q%d' % count[0]
    if libc.syscall(240, name[1:], 0o102, 0o600, None) < 0: raise OSError(ctypes.get_errno(), '')
""",
    "semaphores": """
def make():
    if libc.semget(0, 32000, 0o1600) < 0: raise OSError(ctypes.get_errno(), '')
""",
    "watched descriptors": """
import select
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
watched = os.eventfd(0)
def make():
    kept.append(select.epoll()); kept[-1].register(watched)
""",
    "secret memory": """
def make():
    file = libc.syscall(447, 0)
    if file < 0: raise OSError(ctypes.get_errno(), '')
    os.ftruncate(file, 1 << 20)
    import mmap
    area = mmap.mmap(file, 1 << 20); area.write(bytes(1 << 20)); kept.append(area)
""",
    "mappings": """
import mmap
def make(): kept.append(mmap.mmap(-1, 4096, mmap.MAP_SHARED))
""",
    "pending signals": """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
def make():
    if libc.sigqueue(os.getpid(), 40, 0): raise OSError(ctypes.get_errno(), '')
""",
}
HOARD = """
import ctypes, errno, os, time
libc = ctypes.CDLL(None, use_errno=True)
kept = []
{make}
count, end = 0, time.monotonic() + 3
try:
    while count < {most} and time.monotonic() < end:
        make(); count += 1
except (OSError, MemoryError, ValueError) as error:
    print(count, errno.errorcode.get(getattr(error, 'errno', None) or 0, 'none'), flush=True)
else: print(count, 'all', flush=True)
time.sleep(60)
"""
#: What the kernel keeps for one at least, or how many one sandbox may have; and a modest number.
BOUNDS = {
    "posix timers": (100, 0, 1000),
    "message queues": (0, 256, 5),
    "semaphores": (1 << 20, 0, 2),
    "watched descriptors": (128, 0, 500),
    "secret memory": (1 << 20, 0, 4),
    "mappings": (128, 0, 500),
    "pending signals": (64, 0, 500),
}


@pytest.mark.parametrize("what", HOARDS)
async def test_what_the_kernel_keeps_for_a_sandbox_is_its_own_and_bounded(
    arena: AttackWorld, what: str
) -> None:
    bytes_each, most, modest = BOUNDS[what]
    async with arena.holding(HOARD.format(make=HOARDS[what], most=1)) as said:
        assert said == "1 all"
        before = (await arena.kernel.usage("a")).memory_bytes
    async with arena.holding(HOARD.format(make=HOARDS[what], most=1 << 30)) as said:
        # Whoever comes now gets as many as ever.
        code = HOARD.format(make=HOARDS[what], most=modest)
        async with arena.holding(code, local="neighbour") as beside:
            assert beside == f"{modest} all"
        if not said:
            return  # the kernel ended it at the memory limit: all was charged
        count = int(said.split()[0])
        if most:
            assert modest <= count <= most, said
        else:
            charged = (await arena.kernel.usage("a")).memory_bytes - before
            assert charged >= (count - modest) * bytes_each, (said, charged)


LOCKS = """
import fcntl, os, time
file = os.open('/tmp/locked', os.O_RDWR | os.O_CREAT)
for at in range(0, 2 * 3000, 2): fcntl.lockf(file, fcntl.LOCK_EX, 1, at)
print('locked', flush=True); time.sleep(60)
"""


async def test_locks_on_files_are_nobody_elses_and_end_with_who_has_them(
    arena: AttackWorld,
) -> None:
    def held() -> int:
        return sum(f" {pid} " in line for pid in pids for line in read("/proc/locks").splitlines())

    async with arena.holding(LOCKS) as said:
        assert said == "locked"
        pids = arena.pids()
        assert held() == 3000
        # The same file of the same layers is another one for the neighbour.
        async with arena.holding(LOCKS, local="neighbour") as beside:
            assert beside == "locked"
        await arena.kernel.destroy("a")
        assert held() == 0
    await arena.create("a")


async def test_two_sandboxes_have_the_same_limits_of_their_own_at_the_same_time(
    arena: AttackWorld,
) -> None:
    code = (
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None)\n"
        "count = 0\n"
        "while count < 4000 and libc.inotify_init1(0) >= 0: count += 1\n"
        "print(count, flush=True); time.sleep(60)"
    )
    holding = await arena.exec_until_output(arena.command("python3", "-c", code))
    beside = await arena.python(code.replace("time.sleep(60)", ""), local="neighbour")
    assert int(beside) >= 100
    holding.cancel()
    await asyncio.wait([holding])


def _pages_to_write(descriptor: int) -> int:
    """Return how many pages of a file are still to be written to its disk (``cachestat``)."""
    span, counts = struct.pack("QQ", 0, 0), ctypes.create_string_buffer(40)
    if ctypes.CDLL(None).syscall(451, descriptor, span, counts, 0) != 0:
        pytest.skip("this kernel does not tell which pages of a file are dirty")
    _, dirty, writing, _, _ = struct.unpack("5Q", counts.raw)
    return int(dirty + writing)


async def test_flushing_reaches_no_disk_of_the_host(arena: AttackWorld) -> None:
    run = arena.directory / "run"
    run.mkdir()
    await arena.create("r", run_directory=run)
    # Somebody's data, on the very file system that the sandbox sees a directory of.
    theirs = os.open(run / "theirs", os.O_CREAT | os.O_RDWR)
    try:
        os.write(theirs, bytes(256 * 4096))
        if _pages_to_write(theirs) != 256:
            pytest.skip("the file system of temporary files does not tell what is to be written")
        said = await arena.python(
            CALL + "print(call(162), call(306, os.open('/run/dsec', 0)), call(306, 9999))",
            local="r",
        )
        # All the same when it makes no sense: it does nothing at all.
        assert said == "done done done"
        assert _pages_to_write(theirs) == 256
        os.fsync(theirs)
        assert _pages_to_write(theirs) == 0
    finally:
        os.close(theirs)
    await arena.kernel.destroy("r")


async def test_nothing_tells_how_the_host_was_started(arena: AttackWorld) -> None:
    assert await arena.say("cat /proc/cmdline /proc/keys /proc/kmsg /proc/timer_list") == ""
