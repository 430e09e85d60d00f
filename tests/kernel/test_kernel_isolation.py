"""What a process in a sandbox is, sees and cannot do."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import socket
from collections.abc import Iterator

import pytest

from kernel_world import World, exists, read

# A preamble for probes that call the kernel directly.
CALL = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return 'ok' if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""
# The C library's own signal, which it neither tells of nor sets.
_LIBRARYS_OWN = 32
KEPT = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"}


async def test_root_inside_is_an_ordinary_id_outside(world: World) -> None:
    await world.create()
    await world.say("(sleep 100 >/dev/null 2>&1 &)")
    for pid in world.pids():
        status = read(f"/proc/{pid}/status")
        uids = re.search(r"Uid:\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", status)
        gids = re.search(r"Gid:\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", status)
        assert uids is not None
        assert gids is not None
        assert min(int(value) for value in (*uids.groups(), *gids.groups())) >= 1 << 24
        assert re.search(r"Groups:\s*\n", status)


@pytest.fixture
def as_under_nohup() -> Iterator[None]:
    ignored = (signal.SIGHUP, signal.SIGQUIT)
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    was = _set_action(_LIBRARYS_OWN, bytes([signal.SIG_IGN, *bytes(31)]))
    yield
    _set_action(_LIBRARYS_OWN, was)
    for number, handler in zip(ignored, before, strict=True):
        signal.signal(number, handler)


def _set_action(number: int, action: bytes) -> bytes:
    """Set what a signal does, as the kernel has it; return what it did."""
    before = ctypes.create_string_buffer(32)
    call = 13 if platform.machine() == "x86_64" else 134  # rt_sigaction
    assert ctypes.CDLL(None).syscall(call, number, action, before, 8) == 0
    return before.raw


async def test_what_the_daemon_ignores_is_not_ignored_inside(
    as_under_nohup: None, world: World
) -> None:
    await world.create()
    assert await world.say("grep SigIgn /proc/self/status") == "SigIgn:\t0000000000000000"
    assert "0000000000000000" in await world.say("grep SigIgn /proc/1/status")


async def test_every_namespace_differs_from_the_hosts(world: World) -> None:
    await world.create()
    for name in ("user", "mnt", "pid", "uts", "ipc", "net", "cgroup"):
        inside = await world.say(f"readlink /proc/self/ns/{name}")
        assert inside != os.readlink(f"/proc/self/ns/{name}"), name


async def test_the_network_namespace_belongs_to_the_host(world: World) -> None:
    await world.create()
    said = await world.python(
        "import socket, fcntl, struct\n"
        "s = socket.socket()\n"
        "s.bind(('127.0.0.1', 80)); s.listen()\n"
        "socket.create_connection(('127.0.0.1', 80)); print('ok')\n"
        "try: fcntl.ioctl(s, 0x8914, struct.pack('16sh14x', b'lo', 0)); print('changed')\n"
        "except PermissionError: print('denied')\n"
        "for kind in (socket.SOCK_RAW,):\n"
        "    try: socket.socket(socket.AF_INET, kind, 1); print('raw')\n"
        "    except PermissionError: print('denied')\n"
    )
    assert said.split() == ["ok", "denied", "denied"]


async def test_capabilities_are_few_and_nothing_can_be_gained(world: World) -> None:
    await world.create()
    status = await world.say("cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    allowed = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31}
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert {bit for bit in range(64) if int(fields[name], 16) >> bit & 1} <= allowed, name
    assert int(fields["CapInh"], 16) == int(fields["CapAmb"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    user = await world.say("grep Cap /proc/self/status", user="dev")
    assert set(re.findall(r"Cap(?:Prm|Eff):\t(\w+)", user)) == {"0" * 16}


async def test_a_setuid_file_gives_nothing(world: World) -> None:
    await world.create()
    await world.say("cat /usr/bin/id > /tmp/id && chmod 4755 /tmp/id")
    assert "uid=1000" in await world.say("/tmp/id", user="dev")
    assert "euid" not in await world.say("/tmp/id", user="dev")


async def test_mountinfo_shows_no_path_of_the_host(world: World) -> None:
    run = world.directory / "run"
    run.mkdir()
    await world.create(run_directory=run)
    lines = (await world.say("cat /proc/self/mountinfo")).splitlines()
    roots = {fields[3]: fields[4] for fields in (line.split() for line in lines)}
    known = {"/", "/shm", "/bus", "/fs", "/irq", "/sys", "/sysrq-trigger"}
    known |= {"/furniture/dev", "/furniture/masks/file", "/furniture/masks/directory"}
    # The run directory's own place in its file system cannot be hidden.
    assert {root for root in roots if root not in known} <= {
        root for root, point in roots.items() if point == "/run/dsec"
    }
    for line in lines:
        point = line.split()[4]
        options = line.split()[5].split(",")
        assert "nosuid" in options, line
        assert "nodev" in options or point.startswith("/dev"), line
        source, details = line.split(" - ")[1].split()[1:3]
        assert source in {"dsec", "none", "proc", "devpts"} or point == "/run/dsec"
        assert str(world.directory.parent) not in details


async def test_nothing_of_the_tiny_namespace_is_left_to_look_at(world: World) -> None:
    await world.create()
    assert await world.say("cd / && ls -d new empty-file empty-directory 2>&1 || true") != ""
    assert (await world.shell("ls /new")).exit_code != 0
    assert await world.say("ls /.. | sort") == await world.say("ls / | sort")


async def test_pid_1_cannot_be_read_traced_or_signalled(world: World) -> None:
    await world.create()
    said = await world.python(
        CALL
        + """
for path in ('/proc/1/mem', '/proc/1/environ', '/proc/1/maps'):
    try: open(path, 'rb').read(1); print(path)
    except PermissionError: print('denied')
looks = ((os.readlink, '/proc/1/exe'), (os.stat, '/proc/1/root/'), (os.listdir, '/proc/1/fd'))
for look, path in looks:
    try: look(path); print(path)
    except PermissionError: print('denied')
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
libc.ptrace.argtypes = [ctypes.c_long] * 4
for request in (PTRACE_ATTACH, PTRACE_SEIZE):
    print('traced' if libc.ptrace(request, 1, 0, 0) == 0 else 'denied')
pidfd = os.pidfd_open(1)
print('taken' if call(438, pidfd, 3, 0) == 'ok' else 'denied')
print('read' if call(310, 1, 0, 0, 0, 0, 0) == 'ok' else 'denied')
import signal
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
print('sent')
"""
    )
    lines = said.split()
    assert lines[-1] == "sent"
    assert lines[-2] in {"denied", "read"}  # an empty request reads nothing
    assert set(lines[:-2]) == {"denied"}
    assert await world.say("echo alive") == "alive"


async def test_a_command_inherits_only_its_three_streams(world: World) -> None:
    await world.create()
    assert await world.python("import os; print(sorted(os.listdir('/proc/self/fd')))") == (
        "['0', '1', '2', '3']"  # the last is the listing's own
    )


async def test_masked_paths_of_proc_are_empty(world: World) -> None:
    await world.create()
    names = ("kcore", "keys", "timer_list", "interrupts", "kmsg", "acpi", "driver", "pressure")
    present = [f"/proc/{name}" for name in names if exists(f"/proc/{name}")]
    assert len(present) >= 3
    for path in present:
        seen = await world.say(f"if [ -d {path} ]; then ls {path}; else cat {path}; fi")
        assert seen == "", path


async def test_proc_sys_and_friends_are_read_only(world: World) -> None:
    await world.create()
    for path in ("/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger"):
        assert (await world.shell(f"echo 1 > {path}")).exit_code != 0, path
    assert await world.say("cat /proc/sys/kernel/hostname") == "sandbox"


async def test_dev_has_the_usual_nodes_and_they_work(world: World) -> None:
    await world.create()
    names = await world.say("ls /dev")
    assert " ".join(names.split()) == (
        "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    )
    assert await world.say(
        "echo x > /dev/null; head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c"
    )
    assert (await world.shell("echo x > /dev/full")).exit_code != 0
    assert (await world.shell("echo x > /dev/new")).exit_code != 0
    await world.say("echo x > /dev/shm/fine", user="dev")
    await world.say("echo x > /tmp/fine", user="dev")


async def test_a_sandbox_has_at_most_sixteen_terminals(world: World) -> None:
    await world.create()
    said = await world.python(
        "import os\nkept = []\n"
        "try:\n"
        "    while True: kept.append(os.openpty())\n"
        "except OSError: print(len(kept))\n"
    )
    assert int(said) <= 16


async def test_a_sandbox_has_inotify_instances_of_its_own(world: World) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None)
count = 0
while count < 4000 and libc.inotify_init1(0) >= 0: count += 1
print(count)
"""
    await world.create("a")
    await world.create("b")
    greedy = await world.run("python3", "-c", code + "import time; time.sleep(0)", local="a")
    assert int(greedy.stdout) > 0
    assert int(await world.python(code, local="b")) == int(greedy.stdout)
    # The host's root has not paid for them.
    libc_probe = __import__("ctypes").CDLL(None)
    descriptor = libc_probe.inotify_init1(os.O_CLOEXEC)
    assert descriptor >= 0
    os.close(descriptor)


@pytest.mark.parametrize(
    ("what", "expression"),
    [
        ("mount", "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)"),
        ("umount", "call(166, b'/proc', 0)"),
        ("fsopen", "call(430, b'tmpfs', 0)"),
        ("open_tree", "call(428, -100, b'/', 1)"),
        ("pivot_root", "call(155, b'.', b'.')"),
        ("unshare user", "call(272, 0x10000000)"),
        ("unshare net", "call(272, 0x40000000)"),
        ("setns", "call(308, os.open('/proc/self/ns/net', 0), 0)"),
        ("clone new user", "call(56, 0x10000000 | 17, 0, 0, 0, 0)"),
        ("keyctl", "call(250, 0, -3, 0)"),
        ("add_key", "call(248, b'user', b'a', b'b', 1, -3)"),
        ("io_uring", "call(425, 1, ctypes.create_string_buffer(256))"),
        ("userfaultfd", "call(323, 1)"),
        ("bpf", "call(321, 0, ctypes.create_string_buffer(128), 128)"),
        ("perf_event_open", "call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)"),
        ("open_by_handle_at", "call(304, -100, ctypes.create_string_buffer(64), 0)"),
        ("init_module", "call(175, 0, 0, b'')"),
        ("kexec_load", "call(246, 0, 0, 0, 0)"),
        ("reboot", "call(169, 0xfee1dead, 672274793, 0, 0)"),
        ("sethostname", "call(170, b'x', 1)"),
        ("swapon", "call(167, b'/tmp/x', 0)"),
        ("x32", "call(0x40000000 + 39)"),
    ],
)
async def test_system_calls_that_a_sandbox_has_no_business_with_are_refused(
    world: World, what: str, expression: str
) -> None:
    await world.create()
    assert await world.python(f"{CALL}print({expression})") == "EPERM", what


async def test_clone3_is_absent_so_that_libraries_fall_back(world: World) -> None:
    await world.create()
    assert await world.python(f"{CALL}print(call(435, 0, 0))") == "ENOSYS"
    threads = (
        "import threading\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
    )
    assert await world.python(threads) == "thread"
    assert await world.python("import subprocess; print(subprocess.check_output(['echo', 'x']))")


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_ALG", "AF_PACKET"])
async def test_socket_families_that_no_namespace_confines_are_refused(
    world: World, family: str
) -> None:
    await world.create()
    code = (
        "import socket\n"
        f"try: socket.socket(socket.{family}, socket.SOCK_DGRAM); print('open')\n"
        "except OSError as error: print(error.errno == 97)\n"
    )
    assert hasattr(socket, family)
    assert await world.python(code) == "True"


async def test_ordinary_sockets_work(world: World) -> None:
    await world.create()
    said = await world.python(
        "import socket\n"
        "socket.socketpair(); socket.socket(socket.AF_INET6)\n"
        "socket.socket(socket.AF_NETLINK, 3, 0)\n"
        "socket.getaddrinfo('localhost', 80); print('ok')"
    )
    assert said == "ok"


async def test_the_core_limit_cannot_be_lowered_to_what_a_pipe_ignores(world: World) -> None:
    await world.create()
    said = await world.python(
        "import resource\n"
        "try: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "except (OSError, ValueError): pass\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE))"
    )
    assert said == "(1, 1)"


async def test_device_nodes_cannot_be_made_and_renames_still_work(world: World) -> None:
    await world.create()
    assert (await world.shell("mknod /tmp/sda b 8 0")).exit_code != 0
    assert (await world.shell("mknod /tmp/mem c 1 1")).exit_code != 0
    await world.say(
        "mkdir /tmp/x /tmp/y && echo 1 > /tmp/x/f && mv /tmp/x/f /tmp/y/f && ln /tmp/y/f /tmp/x/g"
    )


async def test_sync_reaches_nobody_and_succeeds(world: World) -> None:
    await world.create()
    await world.say("sync")


async def test_a_sandbox_goes_before_the_nodes_services_when_memory_runs_out(world: World) -> None:
    await world.create()
    assert await world.say("cat /proc/self/oom_score_adj") == "500"
    assert read(f"/proc/{world.init_pid()}/oom_score_adj").strip() == "500"
