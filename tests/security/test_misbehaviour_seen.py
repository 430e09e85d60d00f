"""What agents did in real training runs, and what worked on machines without these defences.

Each attempt fails; the fixture then checks that host, node and neighbour are as before.
"""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from attack_world import CALL, AttackWorld
from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.interface import CommandSpec
from kernel_world import exists, read

INIT = """
import signal, struct
attempt('memory', lambda: os.open('/proc/1/mem', os.O_RDWR))
attempt('map_files', lambda: os.listdir('/proc/1/map_files'))
attempt('descriptors', lambda: os.listdir('/proc/1/fd'))
attempt('environment', lambda: open('/proc/1/environ').read())
attempt('program', lambda: os.open('/proc/1/exe', os.O_RDONLY))
attempt('root', lambda: os.listdir('/proc/1/root'))
attempt('limits', lambda: os.open('/proc/1/oom_score_adj', os.O_WRONLY))
print('trace', call(101, 16, 1, 0, 0))
print('seize', call(101, 0x4206, 1, 0, 0))
init = libc.syscall(434, 1, 0)
for number in range(8): print('take', call(438, init, number, 0))
local, remote = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
vector = struct.pack('PN', ctypes.addressof(local), 8)
print('read', call(310, 1, vector, 1, struct.pack('PN', 0x400000, 8), 1, 0))
print('write', call(311, 1, vector, 1, struct.pack('PN', 0x400000, 8), 1, 0))
for limit in range(16): print('limit', call(302, 1, limit, struct.pack('QQ', 1, 1), 0))
attempt('priority', lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
attempt('priority of all', lambda: os.setpriority(os.PRIO_USER, 0, 19))
attempt('class', lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
attempt('parameter', lambda: os.sched_setparam(1, os.sched_param(0)))
attempt('processors', lambda: os.sched_setaffinity(1, {0}))
print('attributes', call(314, 1, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0))
print('disk', call(251, 1, 1, 3 << 13), call(251, 3, 0, 3 << 13))
print('memory advice', call(440, init, vector, 1, 4, 0))
"""


async def test_pid_1_gives_nothing_of_itself_to_root_inside(arena: AttackWorld) -> None:
    said = await arena.python(CALL + INIT)
    assert not [line for line in said.splitlines() if "done" in line], said
    assert len(said.splitlines()) == 43
    assert "EINVAL" not in said


async def test_pid_1_hears_no_signal_by_any_door(arena: AttackWorld) -> None:
    await arena.python(
        CALL
        + """
init = libc.syscall(434, 1, 0)
for number in range(1, 65):
    if number in (32, 33): continue
    call(62, 1, number); call(200, 1, number); call(234, 1, 1, number)
    call(424, init, number, 0, 0); call(129, 1, number, ctypes.create_string_buffer(128))
"""
    )
    assert await arena.say("echo alive") == "alive"
    # Neither stopped nor traced nor a zombie.
    assert read(f"/proc/{arena.init_pid()}/status").split("State:")[1].split()[0] in {"R", "S"}


async def test_executing_init_itself_leads_nowhere(arena: AttackWorld) -> None:
    # The trick that overwrote the program of a container engine on its host.
    before = (await arena.run("/proc/self/exe")).exit_code
    assert before == 2
    await arena.say("printf '#!/proc/self/exe\\n' > /tmp/trick; chmod 755 /tmp/trick")
    said = await arena.python(
        """
import os
found = set()
for _ in range(200):
    pid = os.fork()
    if pid == 0: os.execv('/tmp/trick', ['/tmp/trick'])
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try:
            name = os.readlink(f'/proc/{pid}/exe')
            descriptor = os.open(f'/proc/{pid}/exe', flags)
            found.add((name, flags))
            os.close(descriptor)
        except OSError: pass
    os.waitpid(pid, 0)
print([name for name, flags in found if 'python' not in name])
"""
    )
    assert said == "[]"


async def test_replaced_programs_change_nothing_that_the_platform_does(
    arena: AttackWorld,
) -> None:
    await arena.shell(
        "for path in /bin/sh /bin/bash /usr/bin/env /usr/bin/python3 /bin/cat /bin/tar /bin/kill"
        " /bin/ls /bin/stat; do printf '#!/attack/whoami\\n' > /tmp/w; chmod 755 /tmp/w;"
        " mv -f /tmp/w $path; done; true"
    )
    ran = await arena.run("/attack/whoami", user="1000")
    assert (ran.exit_code, ran.stdout) == (0, b"1000 1000\n")
    slow = await arena.run("/attack/forks", timeout_s=0.3, grace_s=0.1)
    assert slow.timed_out
    await arena.write("a", "/work/result.txt", b"1")
    assert await arena.read("a", "/work/result.txt") == b"1"
    async with asyncio.timeout(20):  # a file operation answers before its process ends
        while (await arena.kernel.usage("a")).pids > 1:
            await asyncio.sleep(0.01)


def _peak_kib() -> int:
    """Return the most memory that this process had since it was last told to forget that."""
    return int(read("/proc/self/status").split("VmHWM:")[1].split()[0])


def _bytes_written() -> int:
    """Return what this process ever wrote anywhere."""
    return int(read("/proc/self/io").split("wchar:")[1].split()[0])


async def test_endless_output_fills_neither_memory_nor_disk(arena: AttackWorld) -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240  the peak begins anew
    peak_kib, written = _peak_kib(), _bytes_written()
    # Each says at its end how much it printed: far more than all that could be kept.
    flood = (
        "import os, signal, sys\n"
        "def end(*_): os.write(end.to, b'%d' % end.count); os._exit(0)\n"
        "end.to, end.count = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), 0\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "while True: end.count += os.write(1, b'x' * 65536)"
    )
    results = await asyncio.gather(
        *(
            arena.run(
                *("python3", "-c", flood, f"/tmp/printed-{number}"),
                timeout_s=2.0,
                output_limit_bytes=65_536,
                merge_stderr=merged,
            )
            for number, merged in enumerate((False, True, False))
        )
    )
    for number, result in enumerate(results):
        assert result.timed_out
        assert result.stdout_truncated
        assert len(result.stdout) == 65_536
        assert int(await arena.say(f"cat /tmp/printed-{number}")) > 24 << 20
    assert _peak_kib() - peak_kib < 16 << 10
    assert _bytes_written() - written < 4 << 20


NAMESPACES = (
    "call(272, {flag})",
    "call(56, {flag} | 17, 0, 0, 0, 0)",
    "call(435, struct.pack('8Q', {flag}, 0, 0, 0, 17, 0, 0, 0), 64)",
)


@pytest.mark.parametrize("how", NAMESPACES)
async def test_no_namespace_can_be_made_or_entered_inside(arena: AttackWorld, how: str) -> None:
    flags = (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000, 0x80)
    # The last one is a namespace of time: as a flag of clone it is part of the end's signal.
    tries = [how.format(flag=flag) for flag in flags if "call(56" not in how or flag != 0x80]
    said = await arena.python(f"{CALL}\nimport struct\nprint(*({', '.join(tries)},))")
    assert set(said.split()) <= {"EPERM", "ENOSYS"}, said
    entered = await arena.python(
        f"{CALL}\nprint(*(call(308, os.open(f'/proc/self/ns/{{name}}', 0), 0)"
        " for name in os.listdir('/proc/self/ns')))"
    )
    assert set(entered.split()) == {"EPERM"}


MOUNTS = """
import struct
for kind in (b'tmpfs', b'proc', b'sysfs', b'cgroup', b'cgroup2', b'overlay', b'devpts', b'debugfs',
             b'tracefs', b'securityfs', b'bpf', b'mqueue', b'fuse', b'erofs', b'binfmt_misc'):
    print(call(165, b'none', b'/tmp', kind, 0, b'memory' if kind == b'cgroup' else 0))
    print(call(430, kind, 0))
for flags in (0x1000, 0x1000 | 0x4000, 0x2000, 0x20, 0x40000 | 0x4000, 0x100000 | 0x4000):
    print(call(165, b'/proc', b'/tmp', b'', flags, 0))
for path in (b'/proc/sys', b'/proc', b'/dev', b'/dev/shm', b'/'):
    for flags in (0, 2, 8): print(call(166, path, flags))
    print(call(428, -100, path, 1), call(428, -100, path, 0))
    print(call(442, -100, path, 0, struct.pack('4Q', 0, 1, 0, 0), 32))
print(call(155, b'.', b'.'), call(429, -100, b'/tmp', -100, b'/work', 0), call(433, 0, 0))
"""


async def test_nothing_can_be_mounted_moved_or_uncovered(arena: AttackWorld) -> None:
    before = await arena.say("cat /proc/self/mountinfo")
    said = await arena.python(CALL + MOUNTS)
    assert set(said.split()) <= {"EPERM", "ENOSYS"}, said
    assert await arena.say("cat /proc/self/mountinfo") == before


def _release_agents() -> dict[Path, str]:
    return {path: path.read_text() for path in Path("/sys/fs/cgroup").glob("*/release_agent")}


async def test_no_cgroup_file_and_no_release_agent_is_in_reach(arena: AttackWorld) -> None:
    before = _release_agents()
    said = await arena.shell(
        "find / -xdev \\( -name release_agent -o -name cgroup.procs -o -name tasks \\)"
        " -not -path '/proc/*' 2>/dev/null; cat /proc/self/cgroup"
    )
    # In its own namespace a sandbox is the root; its commands are below.
    assert "dsec" not in said.stdout.decode().replace("/exec-", "")
    assert "release_agent" not in said.stdout.decode()
    assert _release_agents() == before


CALLS = {
    "bpf": "call(321, 0, ctypes.create_string_buffer(128), 128)",
    "bpf program": "call(321, 5, ctypes.create_string_buffer(128), 128)",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(256))",
    "io_uring enter": "call(426, 0, 0, 0, 0, 0)",
    "io_uring register": "call(427, 0, 0, 0, 0)",
    "userfaultfd": "call(323, 0)",
    "keyctl": "call(250, 0, -3, 0)",
    "add_key": "call(248, b'user', b'a', b'b', 1, -3)",
    "request_key": "call(249, b'user', b'a', 0, -3)",
    "perf": "call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "handles": "call(304, -100, ctypes.create_string_buffer(64), 0)",
    "quota": "call(179, 0, 0, 0, 0)",
    "accounting": "call(163, b'/tmp/x')",
    "modules": "call(313, 0, b'', 0)",
    "kexec": "call(320, 0, 0, 0, 0, 0)",
    "syslog": "call(103, 3, ctypes.create_string_buffer(4096), 4096)",
    "port": "call(172, 3)",
    "ports": "call(173, 0, 1, 1)",
    "fanotify": "call(300, 0, 0)",
    "compare": "call(312, 1, 1, 0, 0, 0)",
    "look up cookie": "call(212, 0, 0, 0)",
    "migrate": "call(256, 0, 0, 0, 0)",
    "hang up": "call(153)",
    "domain": "call(171, b'x', 1)",
}


async def test_calls_that_lead_deep_into_the_kernel_are_refused(arena: AttackWorld) -> None:
    tries = "\n".join(f"print({what!r}, {how})" for what, how in CALLS.items())
    said = await arena.python(CALL + tries)
    wrong = [line for line in said.splitlines() if line.split()[-1] != "EPERM"]
    assert not wrong


async def test_the_spawners_descriptors_are_as_before_whatever_children_do(
    arena: AttackWorld,
) -> None:
    spawner = arena.kernel._spawner
    assert spawner is not None

    def held() -> dict[str, str]:
        # The very objects: of each name the number that no other one has.
        return {
            path.name: f"{os.readlink(path)} {path.stat().st_dev}:{path.stat().st_ino}"
            for path in Path(f"/proc/{spawner.pid}/fd").iterdir()
        }

    await arena.create("first")
    await arena.kernel.destroy("first")
    before = held()
    for _ in range(5):
        await arena.create("child")
        await arena.shell(
            'for n in 0 1 2 3 4 5 6 7 8 9; do eval "exec $n</dev/null"; done; true',
            local="child",
        )
        overwrite = "import os\nfor number in range(3, 1024): os.dup2(0, number)"
        await arena.python(overwrite, local="child")
        await arena.kernel.destroy("child")
    assert held() == before


SEARCH = """
import os
found, wanted = set(), ('expected_' + 'output=').encode()
def look(path):
    try:
        with open(path, 'rb') as file:
            if wanted in file.read(1 << 24): found.add(path)
    except OSError: pass
for top in ('/tmp', '/run', '/var', '/root', '/home', '/dev/shm', '/srv', '/mnt', '/opt', '/etc'):
    for directory, _, names in os.walk(top):
        for name in names: look(os.path.join(directory, name))
for process in filter(str.isdigit, os.listdir('/proc')):
    for name in ('exe', 'environ', 'cmdline', 'maps', 'stack', 'io', 'mounts', 'root/x', 'cwd/x'):
        look(f'/proc/{process}/{name}')
    try: numbers = os.listdir(f'/proc/{process}/fd')
    except OSError: numbers = []
    for number in numbers:
        path = f'/proc/{process}/fd/{number}'
        if os.path.isfile(path): look(path)
print(sorted(found))
"""


async def test_platform_files_and_logs_are_not_there_to_be_searched(arena: AttackWorld) -> None:
    log = arena.directory / "trajectory.log"
    log.write_text("expected_output=42")
    await arena.run("/bin/echo", "expected_output=42", local="neighbour")
    holding = await arena.exec_until_output(
        CommandSpec(
            argv=("/bin/sh", "-c", "echo begun; sleep 60"),
            env={"ANSWER": "expected_output=42"},
            timeout_s=60,
        ),
        local="neighbour",
    )
    assert await arena.python(SEARCH) == "[]"
    for path in (log, log.parent, f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/cwd"):
        assert (await arena.shell(f"ls -d {path}")).exit_code != 0, path
    # It is a search that finds what there is.
    await arena.write("a", "/home/mine.log", b"expected_output=42")
    assert await arena.python(SEARCH) == "['/home/mine.log']"
    holding.cancel()
    await asyncio.wait([holding])


async def test_a_sandboxs_processes_never_outlive_or_leave_it(arena: AttackWorld) -> None:
    line = "setsid sh -c '(trap \"\" 1 2 3 15; sleep 1000) &' & sleep 1000 & nohup sleep 1000 &"
    await arena.say(f"{line} true")
    pids = arena.pids()
    assert len(pids) > 3
    await arena.kernel.destroy("a")
    assert not [pid for pid in pids if exists(f"/proc/{pid}")]
    with pytest.raises(DsecError) as caught:
        await arena.kernel.exec("a", CommandSpec(argv=("/bin/true",)))
    assert caught.value.code is ErrorCode.NOT_FOUND
