"""Ways out of a sandbox, and into what the platform runs in it: each must lead nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from attack_world import CALL, AttackWorld
from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.file_ports import FileKind
from dsec_sandboxd.run_directory import RunDirectory
from kernel_world import make_image

UP = "/".join([".."] * 16)


async def test_no_working_directory_leads_through_an_inherited_descriptor(
    arena: AttackWorld,
) -> None:
    doors = [f"/proc/self/fd/{number}" for number in range(3, 40)]
    doors += ["/proc/1/cwd", "/proc/1/root", "/proc/thread-self/fd/6"]
    for number, door in enumerate(doors):
        await arena.say(f"ln -sfn {door} /tmp/door-{number}")
        for cwd in (door, f"/tmp/door-{number}"):
            with pytest.raises(DsecError) as caught:
                await arena.run("/bin/ls", UP, cwd=cwd)
            assert caught.value.code in {ErrorCode.NOT_FOUND, ErrorCode.DENIED}, cwd
    # Where one may go, the sandbox's root is the top.
    for cwd in ("/proc/self", "/dev/shm", "/proc/self/cwd", "/proc/self/root", "/dev/pts"):
        said = await arena.say(f"ls {UP}; ls /proc/self/cwd/{UP}", cwd=cwd)
        assert said.split() == 2 * (await arena.say("ls /")).split(), cwd


async def test_no_path_of_a_transfer_leads_to_a_process_or_a_descriptor(
    arena: AttackWorld,
) -> None:
    doors = [f"/proc/self/fd/{number}" for number in range(12)]
    doors += ["/proc/self/mem", "/proc/self/environ", "/proc/1/environ", "/proc/1/root/etc/passwd"]
    doors += ["/proc/self/exe", "/dev/zero", "/dev/tty", "/dev/ptmx", "/proc/self/maps"]
    await arena.say("mkfifo /tmp/fifo; ln -s loop /tmp/loop; ln -s /nowhere /tmp/dangling")
    doors += ["/tmp/fifo", "/tmp/loop", "/tmp/dangling", "/run/dsec"]
    for door in doors:
        await arena.say(f"ln -sfn {door} /tmp/door")
        for path in (door, "/tmp/door"):
            with pytest.raises(DsecError) as caught:
                await arena.read("a", path)
            assert caught.value.code in {
                ErrorCode.INVALID,
                ErrorCode.NOT_FOUND,
                ErrorCode.DENIED,
            }, (path, caught.value)


async def test_a_link_in_a_written_path_stays_in_the_sandbox(arena: AttackWorld) -> None:
    marker = arena.directory / "marker"
    await arena.say(f"ln -s {marker} /tmp/out; ln -s / /tmp/top")
    for path in ("/tmp/out", f"/tmp/top/{UP}{marker}", f"/{UP}{marker}"):
        with contextlib.suppress(DsecError):  # there is no such directory in the sandbox
            await arena.write("a", path, b"x")
    assert not marker.exists()


async def test_a_path_swapped_under_a_transfer_never_leads_out(arena: AttackWorld) -> None:
    await arena.say("mkdir -p /tmp/real && echo inside > /tmp/real/passwd")
    swapping = asyncio.ensure_future(
        arena.shell(
            "while :; do ln -sfn /tmp/real /tmp/x; ln -sfn /proc/self/fd /tmp/x;"
            " ln -sfn /proc/1/root/etc /tmp/x; done",
            timeout_s=20,
        )
    )
    for _ in range(150):
        try:
            content = await arena.read("a", "/tmp/x/passwd")
        except DsecError as error:
            assert error.code in {  # noqa: PT017  some of many tries may succeed
                ErrorCode.NOT_FOUND,
                ErrorCode.DENIED,
                ErrorCode.INVALID,
            }
        else:
            assert content == b"inside\n"
    swapping.cancel()
    await asyncio.wait([swapping])


# Without Landlock the one for whiteouts (0, 0) needs no right at all in shared memory, and the
# others fail only for want of a capability, with EPERM.
NODES = """
import stat
places = ('/tmp', '/dev/shm', '/work', '/etc', '/')
for place in places:
    for kind, device in ((stat.S_IFCHR, (0, 0)), (stat.S_IFCHR, (1, 1)), (stat.S_IFCHR, (1, 3)),
                         (stat.S_IFBLK, (0, 0)), (stat.S_IFBLK, (8, 0))):
        attempt('node', lambda: os.mknod(f'{place}/node', kind | 0o666, os.makedev(*device)))
    directory = os.open(place, os.O_RDONLY)
    print('node', call(259, directory, b'node', 0o020666, 0))
print('left', [place for place in places if os.path.lexists(f'{place}/node')])
for place in places: os.mkfifo(f'{place}/node'); os.unlink(f'{place}/node')
"""


@pytest.mark.parametrize("user", ["0", "1000"])
async def test_no_device_node_is_made_even_where_no_right_is_needed(
    arena: AttackWorld, user: str
) -> None:
    await arena.say("chmod 777 /tmp /dev/shm /work /etc /")
    *nodes, left = (await arena.python(CALL + NODES, user=user)).splitlines()
    assert nodes == ["node EACCES"] * 30
    assert left == "left []"


async def test_the_kernels_other_doors_are_closed(arena: AttackWorld) -> None:
    said = await arena.say("/attack/entries")
    assert said.split() in (["x32", "0", "i386", "0"], ["x32", "0"])


async def test_nothing_of_the_kernels_files_can_be_written(arena: AttackWorld) -> None:
    said = await arena.python(
        """
import os
found = []
for top in ('/proc', '/sys'):
    for directory, names, files in os.walk(top):
        if directory == '/proc':
            names[:] = [name for name in names if not name.isdigit()
                        and name not in ('self', 'thread-self', 'net')]
        for name in files:
            path = os.path.join(directory, name)
            if os.path.islink(path): continue
            try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError: continue
            found.append(path)
print(found)
"""
    )
    assert said == "[]"


async def test_tricks_of_root_change_nothing_outside(arena: AttackWorld) -> None:
    said = await arena.python(
        CALL
        + """
import fcntl, socket, struct, time
attempt('clock', lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
attempt('nice', lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt('real-time', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
attempt('core-pattern', lambda: os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY))
file = os.open('/work/code.txt', os.O_RDWR)
attempt('immutable', lambda: fcntl.ioctl(file, 0x40086602, struct.pack('l', 16)))
master, slave = os.openpty()
attempt('key-strokes', lambda: fcntl.ioctl(slave, 0x5412, b'x'))
attempt('line-discipline', lambda: fcntl.ioctl(slave, 0x5423, struct.pack('i', 21)))
attempt('module-by-protocol', lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132))
attempt('socket-filter', lambda: socket.socket().setsockopt(1, 26, bytes(16)))
attempt('trusted-attribute', lambda: os.setxattr('/tmp', 'trusted.overlay.opaque', b'y'))
print('file-handle', call(304, -100, bytes(64), 0))
print('adjust-time', call(159, struct.pack('l', 1).ljust(208, b'\\1')))
"""
    )
    lines = said.splitlines()
    assert len(lines) == 12
    assert not [line for line in lines if "done" in line], said


FILE_SYSTEMS = """
import fcntl
kinds = set()
for line in open('/proc/self/mountinfo'):
    where, kind = line.split()[4], line.split(' - ')[1].split()[0]
    kinds.add(kind)
    paths = [where] if not os.path.isdir(where) else [
        os.path.join(where, name) for name in os.listdir(where)[:50]]
    for path in filter(os.path.isfile, paths):
        try: file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError: continue
        # XFS: swap extents, by handle; ext4: move extents; all: clone from another file.
        for number in (0xc0c0586d, 0xc0385869, 0xc028660f, 0x40049409, 0x4020940d):
            attempt('call', lambda: fcntl.ioctl(file, number, bytes(192)))
        os.close(file)
print(*sorted(kinds))
"""


async def test_no_file_inside_is_on_a_file_system_of_the_hosts_disks(arena: AttackWorld) -> None:
    # What swaps the contents of two files needs one that stores them on a disk: neither the layers
    # nor what is in memory knows such calls, and there is nothing else, the agent's directory
    # included.
    directories = RunDirectory(arena.directory / "run")
    directories.open()
    try:
        await arena.create("r", run_directory=directories.make("r"))
        said = await arena.python(CALL + FILE_SYSTEMS, local="r")
        await arena.kernel.destroy("r")
    finally:
        directories.remove("r")
        directories.close()
    *calls, kinds = said.splitlines()
    assert kinds == "devpts overlay proc tmpfs"
    assert calls
    assert not [line for line in calls if "done" in line], said


async def test_a_new_root_directory_is_still_inside(arena: AttackWorld) -> None:
    said = await arena.python(
        """
import os
top = os.open('/', os.O_RDONLY)
os.makedirs('/tmp/jail'); os.chroot('/tmp/jail'); os.fchdir(top)
for _ in range(64): os.chdir('..')
os.chroot('.')
print(sorted(os.listdir('/')))
"""
    )
    assert said == str(sorted((await arena.say("ls -A /")).split()))


async def test_hostile_layers_give_no_device_no_privilege_and_no_redirection(
    arena: AttackWorld,
) -> None:
    tree = arena.directory / "hostile"
    (tree / "hostile").mkdir(parents=True)
    for name, kind, device in (
        ("mem", stat.S_IFCHR, (1, 1)),
        ("null", stat.S_IFCHR, (1, 3)),
        ("sda", stat.S_IFBLK, (8, 0)),
    ):
        os.mknod(tree / "hostile" / name, kind | 0o666, os.makedev(*device))
    program = tree / "hostile/whoami"
    shutil.copy(arena.attack_programs / "whoami", program)
    program.chmod(0o6755)
    # Were its attributes believed, it would show a file of a lower layer that is root's alone.
    decoy = tree / "hostile/decoy"
    decoy.write_text("a decoy.")
    decoy.chmod(0o644)
    moved = tree / "moved"
    moved.mkdir()
    os.setxattr(moved, "trusted.overlay.redirect", b"/root")
    os.setxattr(decoy, "trusted.overlay.metacopy", b"")
    os.setxattr(decoy, "trusted.overlay.redirect", b"/root/secret")
    await arena.kernel.hold_layer("hostile", make_image(tree, arena.directory / "hostile.erofs"))
    layers = ("base", "workspace", "toolkit", "attackers", "hostile")
    await arena.create("h", layers=layers)
    for name in ("mem", "null", "sda"):
        assert (await arena.shell(f"cat /hostile/{name}", local="h")).exit_code != 0, name
        with pytest.raises(DsecError) as caught:
            await arena.read("h", f"/hostile/{name}")
        assert caught.value.code in {ErrorCode.DENIED, ErrorCode.INVALID}
    assert await arena.say("stat -c %a /hostile/whoami", local="h") == "6755"
    assert await arena.say("/hostile/whoami", local="h", user="dev") == "1000 1000"
    shown = await arena.shell("cat /hostile/decoy", local="h", user="dev")
    assert (shown.stdout, shown.exit_code) == (b"", 1), "the kernel refuses what it may not believe"
    await arena.say("cp /attack/whoami /tmp/whoami && chmod 6755 /tmp/whoami", local="h")
    assert await arena.say("/tmp/whoami", local="h", user="dev") == "1000 1000"
    assert (await arena.shell("cat /moved/secret", local="h")).exit_code != 0
    await arena.kernel.destroy("h")
    await arena.kernel.release_layer("hostile")


def _kinds_of_descriptors(pid: int) -> list[str]:
    targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(re.sub(r"[0-9]+", "N", target) for target in targets)


async def test_init_holds_its_socket_and_signals_and_nothing_of_the_host(
    arena: AttackWorld,
) -> None:
    # The first is the sandbox's own writable layer, kept there for a later daemon.
    expected = ["/", *["/dev/null"] * 3, "anon_inode:[signalfd]", "socket:[N]", "socket:[N]"]
    assert _kinds_of_descriptors(arena.init_pid()) == expected
    for _ in range(3):
        await arena.say("true")
        await arena.read("a", "/etc/passwd")
    assert _kinds_of_descriptors(arena.init_pid()) == expected


async def test_file_operations_do_not_depend_on_what_the_sandbox_has_made_of_its_programs(
    arena: AttackWorld,
) -> None:
    # The loader goes last: after it no program of the sandbox but a static one works.
    await arena.shell(
        "printf /tmp/evil.so > /etc/ld.so.preload; mkfifo /etc/new; mv /etc/new /etc/group;"
        "printf 'root:x:0:0::/proc:\\n' > /etc/passwd; ln -sfn /dev/zero /etc/nsswitch.conf;"
        "for path in /bin/cat /bin/ls /usr/bin/env /bin/sh;"
        " do cp /attack/whoami /tmp/w; mv -f /tmp/w $path; done;"
        "mv -f /bin/sh /lib64/ld-linux-x86-64.so.2"
    )
    await arena.write("a", "/work/answer", b"from outside")
    assert await arena.read("a", "/work/answer") == b"from outside"
    assert (await arena.kernel.stat("a", "/work/answer")).size_bytes == 12
    await arena.kernel.make_directory("a", "/work/new/deep", parents=True)
    await arena.kernel.rename("a", "/work/answer", "/work/new/deep/answer")
    assert [
        (entry.name, entry.kind)
        for entry in await arena.kernel.list_directory("a", "/work/new/deep")
    ] == [("answer", FileKind.FILE)]
    await arena.kernel.unlink("a", "/work/new/deep/answer")
    # A static program needs none of what was replaced, and is no less confined.
    said = await arena.run("/attack/whoami")
    assert (said.exit_code, said.stdout) == (0, b"0 0\n")


async def test_an_environment_that_preloads_reaches_only_its_own_command(
    arena: AttackWorld,
) -> None:
    env = {"LD_PRELOAD": "/tmp/evil.so", "LD_LIBRARY_PATH": "/tmp", "BASH_ENV": "/tmp/evil"}
    await arena.shell("true", env=env)
    assert "LD_PRELOAD" not in await arena.say("tr '\\0' '\\n' < /proc/self/environ")


async def test_searching_everything_finds_nothing_of_host_or_neighbours(
    arena: AttackWorld,
) -> None:
    (arena.directory / "answers.txt").write_text("kept from the agent")
    tops = await arena.say("ls -d /* | grep -v /proc")
    found = await arena.shell(f"grep -rsl kept {tops} | grep -v python".replace("\n", " "))
    assert found.stdout == b"", found
    # Below /proc there are files without an end: such a search ends at its time.
    found = await arena.shell("grep -rsl 'kept from' /proc", timeout_s=1)
    assert found.timed_out
    names = await arena.say("ls /proc /run /run/dsec")
    assert len([name for name in names.split() if name.isdigit()]) <= 4


async def test_each_sandbox_is_alone_on_its_network(arena: AttackWorld) -> None:
    listening = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    said = await arena.python(
        f"""
import socket, errno
for address in (('127.0.0.1', {port}), ('10.0.0.1', 4222), ('169.254.169.254', 80)):
    s = socket.socket(); s.settimeout(2)
    try: s.connect(address); print('reached')
    except OSError as error: print(errno.errorcode[error.errno])
print([name for _, name in socket.if_nameindex()])
print(len(open('/proc/net/unix').readlines()))
"""
    )
    listening.close()
    await listening.wait_closed()
    assert said.split("\n") == ["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH", "['lo']", "1"]
