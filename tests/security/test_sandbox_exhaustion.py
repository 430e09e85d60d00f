"""What the node shares: a sandbox that takes all it can get gets its own part and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from attack_world import CALL, AttackWorld
from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandSpec
from kernel_world import MIB, NODE, descriptors_of, read, wait_until_dead

# Raise the limit of descriptors as far as it goes, then take.
GREED = """
import errno, os, resource, socket, sys, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
kept = []
def take(make, most=30000):
    try:
        while len(kept) < most: kept.append(make())
    except OSError as error: return len(kept), errno.errorcode[error.errno]
    return len(kept), 'all'
def buffered(protocol):
    for line in open('/proc/net/sockstat'):
        if line.startswith(protocol + ':'): return int(line.split()[-1]) * 4096 >> 20
"""
FLOODS = {
    "TCP": """
server = socket.socket(); server.bind(('127.0.0.1', 0)); server.listen(64)
block, sent, before = bytes(65536), 0, buffered('TCP')
for _ in range(200):
    ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    kept += ends
    for end in ends:
        end.setblocking(False)
        try:
            while sent < 600 << 20: sent += end.send(block)
        except BlockingIOError: pass
print(buffered('TCP') - before)
""",
    "UDP": """
sender, block = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), bytes(16000)
before = buffered('UDP')
for _ in range(900):
    target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
    target.bind(('127.0.0.1', 0)); kept.append(target)
    for _ in range(40): sender.sendto(block, target.getsockname())
print(buffered('UDP') - before)
""",
}


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
async def test_what_sockets_buffer_is_limited(arena: AttackWorld, protocol: str) -> None:
    held_mib = int(await arena.python(GREED + FLOODS[protocol]))
    # An eighth of the sandbox's 128 MiB, and what the kernel grants every socket at least.
    # Without a limit of its own this is 600 MiB, and the whole node's connections starve.
    assert held_mib < 48


FILL = """
held = []
def unix():
    ends = socket.socketpair(); ends[0].setblocking(False)
    held.append(ends[0].send(bytes(65536))); return ends
def pipe():  # a user's first thousand are larger than the rest
    ends = os.pipe(); os.set_blocking(ends[1], False)
    held.append(os.write(ends[1], bytes(65536))); return ends
def memory():
    file = os.memfd_create('x'); held.append(os.write(file, bytes(1 << 20))); return file
def device(): return os.open('/dev/null', os.O_RDONLY)
def event(): return os.eventfd(0)
"""


HOLD = "; sys.stdout.flush(); time.sleep(60)"


# Of each so many, and what the kernel keeps for one at least: what is not charged is the node's.
@pytest.mark.parametrize(
    ("what", "most", "bytes_each"),
    [
        ("unix", 400, 64 << 10),
        ("pipe", 400, 64 << 10),
        ("memory", 40, 1 << 20),
        ("device", 15_000, 128),
        ("event", 15_000, 192),
    ],
)
async def test_what_descriptors_hold_is_charged_to_the_sandbox(
    arena: AttackWorld, what: str, most: int, bytes_each: int
) -> None:
    charged = []
    for count in (1, 1, most):  # the first one pays for the pages of Python, too
        code = f"{GREED}{FILL}print(take({what}, {count})){HOLD}"
        async with arena.holding(code) as said:
            assert said == f"({count}, 'all')"
            charged.append((await arena.kernel.usage("a")).memory_bytes)
    assert charged[-1] - charged[-2] >= (most - 1) * bytes_each, charged


@pytest.mark.parametrize("what", ["unix", "pipe", "memory"])
async def test_descriptors_that_hold_much_end_at_the_memory_limit(
    arena: AttackWorld, what: str
) -> None:
    # It may wear itself out at the limit: four seconds of that are enough.
    tired = (
        "end = time.monotonic() + 4\n"
        "def until(make):\n"
        "    if time.monotonic() > end: raise OSError(errno.EINTR, 'tired')\n"
        "    return make()\n"
    )
    code = f"{GREED}{FILL}{tired}take(lambda: until({what}), 1 << 20); print(sum(held)){HOLD}"
    async with arena.holding(code) as said:
        # The kernel ended it, or refused more: far short of what its descriptors could hold.
        assert int(said or 0) <= 128 * MIB, said
        await arena.python(f"{GREED}{FILL}assert take({what}, 30)[1] == 'all'", local="neighbour")


def _files_in_use() -> int:
    return int(read("/proc/sys/fs/file-nr").split()[0])


@pytest.mark.alone
async def test_many_processes_with_all_their_descriptors_are_charged_for_each(
    arena: AttackWorld,
) -> None:
    # Together they print how many they have, once all have all.
    code = (
        GREED
        + """
most, (told, tell) = int(sys.argv[1]), os.pipe()
for _ in range(16):
    if os.fork() == 0:
        taken = take(lambda: os.open('/dev/null', os.O_RDONLY), most)[0]
        os.write(tell, b'%9d' % taken); time.sleep(60)
print(sum(int(os.read(told, 9)) for _ in range(16)))
"""
    )
    charged, in_use = [], []
    for most in (1, 1, 4000):
        line = code.replace("int(sys.argv[1])", str(most)) + HOLD.lstrip("; ")
        async with arena.holding(line) as said:
            assert int(said) == 16 * most
            charged.append((await arena.kernel.usage("a")).memory_bytes)
            in_use.append(_files_in_use())
            # The node's table has room: somebody else opens as many as ever.
            await arena.python(GREED + NULLS, local="neighbour")
    taken = 16 * 3999
    assert in_use[-1] - in_use[-2] > taken * 0.9, "the table is the node's"
    assert charged[-1] - charged[-2] >= taken * 128


NULLS = "\nassert take(lambda: os.open('/dev/null', os.O_RDONLY), 1000) == (1000, 'all')"


@pytest.mark.alone
async def test_the_nodes_asynchronous_contexts_and_keys_are_out_of_reach(
    arena: AttackWorld,
) -> None:
    before = read("/proc/sys/fs/aio-nr")
    said = await arena.python(
        f"{CALL}\nimport collections\n"
        "print(collections.Counter(call(206, 1000, ctypes.byref(ctypes.c_long(0)))"
        " for _ in range(100)))\n"
        "print(call(250, 0, -3, 1), call(248, b'user', b'a', b'b', 1, -3))"
    )
    assert said.split("\n") == ["Counter({'ENOSYS': 100})", "EPERM EPERM"]
    assert int(read("/proc/sys/fs/aio-nr")) <= int(before) + 1000


async def test_objects_of_old_interprocess_communication_end_with_the_sandbox(
    arena: AttackWorld,
) -> None:
    code = (
        CALL
        + """
import time
libc.shmat.restype = ctypes.c_void_p
for size in (8 << 20,) * 4:
    shared = libc.shmget(0, size, 0o1600)
    address = libc.shmat(shared, None, 0)
    if address != ctypes.c_void_p(-1).value: ctypes.memset(address, 1, size)
print(sum(1 for _ in open('/proc/sysvipc/shm')) - 1)
"""
    )
    assert await arena.python(code) == "4"
    assert await arena.python("print(sum(1 for _ in open('/proc/sysvipc/shm')) - 1)") == "4"
    assert (await arena.kernel.usage("a")).memory_bytes > 32 * MIB
    assert await arena.say("wc -l < /proc/sysvipc/shm", local="neighbour") == "1"
    await arena.kernel.destroy("a")
    await arena.create("a")
    assert await arena.say("wc -l < /proc/sysvipc/shm") == "1"


async def test_no_trace_of_a_sandboxs_connections_meets_the_next_one(arena: AttackWorld) -> None:
    await arena.python(
        """
import socket
server = socket.socket(); server.bind(('127.0.0.1', 8080)); server.listen(64)
for _ in range(200):
    here = socket.create_connection(('127.0.0.1', 8080)); there, _ = server.accept()
    there.close(); here.close()
"""
    )
    assert "tw 200" in await arena.say("cat /proc/net/sockstat")
    slot = arena.kernel._sandboxes["a"].slot
    await arena.kernel.destroy("a")
    await arena.create("a")
    assert arena.kernel._sandboxes["a"].slot == slot
    said = await arena.python(
        "import socket\n"
        "socket.socket().bind(('127.0.0.1', 8080))\n"
        "print(open('/proc/net/sockstat').read(), open('/proc/net/dev').read())"
    )
    assert "tw 0" in said
    assert said.split("lo:")[1].split()[:2] == ["0", "0"]


async def test_a_fork_bomb_dies_with_its_sandbox_at_once(arena: AttackWorld) -> None:
    bomb = asyncio.ensure_future(arena.run("/attack/forks", timeout_s=60))
    async with asyncio.timeout(10):
        while len(arena.pids("a")) < 60:
            await asyncio.sleep(0.01)
    # The platform's own operations are refused in words, and the neighbour does not notice.
    outcomes = await asyncio.gather(
        *(arena.kernel.stat("a", "/etc/passwd") for _ in range(50)), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, DsecError)]
    assert {error.code for error in refused} == {ErrorCode.EXHAUSTED}
    assert (await arena.run("/bin/echo", "x", local="neighbour")).stdout == b"x\n"
    pids, began_at = arena.pids("a"), time.monotonic()
    await arena.kernel.destroy("a")
    assert time.monotonic() - began_at < 20
    with pytest.raises(DsecError) as caught:
        await bomb
    assert caught.value.code is ErrorCode.UNAVAILABLE
    for pid in pids:
        wait_until_dead(pid)


async def _code_of(operation: Awaitable[object]) -> ErrorCode | None:
    try:
        await operation
    except DsecError as error:
        return error.code
    return None


async def test_daemons_left_by_every_command_cost_the_node_no_descriptors(
    arena: AttackWorld,
) -> None:
    before = len(descriptors_of())
    for _ in range(40):
        await arena.say("sleep 1000 >/dev/null 2>&1 &")
    assert len(descriptors_of()) <= before + 2
    assert len(arena.pids("a")) == 41
    await arena.shell("kill -9 -1")
    # With every command two more of what they left are looked at.
    for _ in range(20):
        await arena.say("true")
    left = [path for path in arena.cgroup().iterdir() if path.name.startswith("exec-")]
    assert len(left) <= 3


async def test_sandboxes_that_all_fork_leave_numbers_to_the_host(arena: AttackWorld) -> None:
    most = min(int(read(f"/proc/sys/kernel/{name}")) for name in ("pid_max", "threads-max"))
    limits = [
        path / "pids.max"
        for path in (arena.cgroup().parent, Path(f"/sys/fs/cgroup/pids/dsec-{NODE}"))
        if (path / "pids.max").exists()
    ]
    assert [int(path.read_text()) for path in limits] == [most * 3 // 4]


async def test_stopping_or_killing_all_processes_stops_no_transfer_for_long(
    arena: AttackWorld,
) -> None:
    for number in ("19", "9"):
        stopper = await arena.exec_until_output(
            CommandSpec(argv=("/attack/stopper", number), timeout_s=60)
        )
        async with asyncio.timeout(20):
            outcomes = [await _code_of(arena.kernel.stat("a", "/etc/passwd")) for _ in range(100)]
        assert set(outcomes) <= {None, ErrorCode.UNAVAILABLE}
        stopper.cancel()
        await asyncio.wait([stopper])
    assert await arena.say("echo alive") == "alive"
    assert (
        await arena.shell("kill -9 -1; kill -19 -1; kill -9 1; kill -19 1")
    ).exit_code is not None
    assert await arena.say("echo alive") == "alive"


async def test_a_command_that_is_stopped_ends_at_its_time(arena: AttackWorld) -> None:
    result = await arena.shell("kill -STOP $$", timeout_s=1.5, grace_s=0.1)
    assert result.timed_out
    assert result.signal == 9


async def test_a_directory_of_very_many_names_is_listed_in_part_and_quickly(
    arena: AttackWorld,
) -> None:
    await arena.create("wide", inodes=40_000, memory_bytes=256 * MIB)
    await arena.python(
        "import os\nos.mkdir('/tmp/w'); os.chdir('/tmp/w')\n"
        "for n in range(20000): os.close(os.open(f'{n:0>200}', os.O_CREAT | os.O_WRONLY))",
        local="wide",
    )
    async with asyncio.timeout(10):
        assert len(await arena.kernel.list_directory("wide", "/tmp/w")) == 10_000
    await arena.kernel.destroy("wide")


async def test_directories_ten_thousand_deep_are_refused_by_path_and_vanish_on_delete(
    arena: AttackWorld,
) -> None:
    await arena.create("deep", inodes=12_000)
    await arena.python(
        "import os\nos.chdir('/tmp')\nfor _ in range(10000): os.mkdir('d'); os.chdir('d')\n"
        "open('end', 'w').close()",
        local="deep",
    )
    with pytest.raises(DsecError) as caught:
        await arena.kernel.stat("deep", "/tmp" + "/d" * 10_000)
    assert caught.value.code is ErrorCode.INVALID
    async with asyncio.timeout(10):
        await arena.kernel.destroy("deep")


def _cpu_ticks(pid: int) -> int:
    """Return the processor time of a process in hundredths of a second."""
    return sum(int(field) for field in read(f"/proc/{pid}/stat").rsplit(")")[-1].split()[11:13])


async def test_a_layer_full_of_files_is_freed_without_holding_up_creations(
    arena: AttackWorld,
) -> None:
    await arena.create("full", inodes=150_000, memory_bytes=512 * MIB)
    await arena.python(
        "import os\nos.chdir('/dev/shm')\n"
        "for n in range(140000): os.close(os.open(str(n), os.O_CREAT | os.O_WRONLY))",
        local="full",
        timeout_s=60,
    )
    spawner = arena.kernel._spawner
    assert spawner is not None
    before = _cpu_ticks(spawner.pid)
    await arena.kernel.destroy("full")
    # By the spawner itself it takes about 40, during which nothing can be created on the node.
    assert _cpu_ticks(spawner.pid) - before < 10


async def test_a_sparse_file_of_any_size_is_read_piece_by_piece(arena: AttackWorld) -> None:
    await arena.say("dd if=/dev/null of=/tmp/sparse bs=1 seek=4T 2>/dev/null")
    assert (await arena.kernel.stat("a", "/tmp/sparse")).size_bytes == 4 << 40
    assert await arena.read("a", "/tmp/sparse") == bytes(MIB)


async def test_a_memory_bomb_takes_its_sandbox_and_nobody_else(arena: AttackWorld) -> None:
    code = "kept = []\nwhile True: kept.append(bytearray(1 << 20))"
    result = await arena.run("python3", "-c", code)
    assert result.oom
    # In shared memory, in files, and by so many processes that nobody is the largest.
    assert (await arena.shell("dd if=/dev/zero of=/dev/shm/x bs=1M 2>/dev/null")).exit_code != 0
    assert (await arena.shell("dd if=/dev/zero of=/tmp/x bs=1M 2>/dev/null")).exit_code != 0
    crowd = (
        "import os\nfor _ in range(30):\n    if os.fork() == 0:\n        kept = []\n"
        "        while True: kept.append(bytearray(1 << 18))\n"
        "raise SystemExit(sum(os.wait()[1] != 0 for _ in range(30)))"
    )
    assert (await arena.run("python3", "-c", crowd, timeout_s=60)).oom
    assert (await arena.read("a", "/etc/passwd")).startswith(b"root:")
