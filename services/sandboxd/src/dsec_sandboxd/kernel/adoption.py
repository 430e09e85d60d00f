"""Finding a living sandbox again: by its PID 1's inode, never by a number that may be reused.

What a daemon needs of a sandbox that an earlier one made is all with the sandbox: its PID 1 keeps
the daemon's end of the control socket and the writable layer at fixed descriptors, the kernel
knows its network namespace and id range, its cgroups are directories. A process's inode in pidfs
is never used twice while the host is up, so whatever happened meanwhile, a match is that process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, from_os_error, not_found
from dsec_sandboxd.kernel.alone import end_what_ran_alone
from dsec_sandboxd.kernel.cgroups_tree import list_directories, read_processes
from dsec_sandboxd.kernel.interface import SandboxIdentity
from dsec_sandboxd.kernel.protocol import (
    CONTROL_PROTOCOL,
    HOST_END_FD,
    WRITABLE_FD,
    SpawnerKind,
    SpawnerRequest,
)
from dsec_sandboxd.kernel.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dsec_sandboxd.kernel.cgroups import CgroupDriver
    from dsec_sandboxd.kernel.slots import SlotPool
    from dsec_sandboxd.kernel.spawner import Spawner

_PIDFD_GETFD: Final = 438  # the same number on every machine
_PIDFD_GET_NET_NAMESPACE: Final = 0xFF04
_libc: Final = ctypes.CDLL(None, use_errno=True)


def inode_of(pidfd: int) -> int:
    """Return the number that names a process as long as the host is up."""
    return os.fstat(pidfd).st_ino


def identity_of(sandbox: Sandbox, slots: SlotPool) -> SandboxIdentity:
    """Return by what a later daemon recognises a living sandbox."""
    return SandboxIdentity(
        init_inode=inode_of(sandbox.pidfd),
        slot=sandbox.slot,
        base_id=slots.base_id(sandbox.slot),
        oom_group=sandbox.oom_group,
        handle="" if sandbox.cgroup.local == sandbox.local else sandbox.cgroup.local,
        protocol=CONTROL_PROTOCOL,
    )


def adopt_sandbox(
    local: str,
    identity: SandboxIdentity,
    driver: CgroupDriver,
    slots: SlotPool,
    on_end: Callable[[], None],
    *,
    paused: bool = False,
) -> Sandbox:
    """Take over a living sandbox that an earlier daemon made, with its slot.

    It runs, or is paused but for its PID 1, which has to answer while it is taken over.

    Raises:
        DsecError: ``not_found`` when it has ended, ``conflict`` when its ids are not ours to give,
            ``unsupported`` when its PID 1 speaks another protocol, else naming the call that
            failed; then nothing is held of it.
    """
    if identity.protocol != CONTROL_PROTOCOL:
        raise DsecError(
            ErrorCode.UNSUPPORTED,
            f"its PID 1 is another version's and speaks protocol {identity.protocol}, this daemon "
            f"{CONTROL_PROTOCOL}: delete sandboxes before an upgrade that changes it",
        )
    cgroup = driver.adopt(identity.handle or local)
    pidfd = find_process(cgroup.processes(), identity.init_inode)
    if pidfd < 0:
        raise not_found("its PID 1 ended while the node's daemon was away", what="sandbox")
    control_fd, claimed = -1, False
    try:
        slots.claim(identity.slot, identity.base_id)
        claimed = True
        control_fd = take_control_socket(pidfd)
        cgroup.watch_oom(end_all=identity.oom_group)
        cgroup.delegate_exec(identity.base_id)
        sandbox = Sandbox(
            local,
            identity.slot,
            cgroup,
            pidfd=pidfd,
            control_fd=control_fd,
            on_end=on_end,
            adopted=True,
        )
    except BaseException:
        os.close(pidfd)
        if control_fd >= 0:
            os.close(control_fd)
        if claimed:
            slots.give_back(identity.slot)
        raise
    sandbox.oom_group = identity.oom_group
    end_what_ran_alone(cgroup)
    if paused:
        sandbox.freezer.pause_commands()
    else:
        sandbox.freezer.let_all_go()  # stopped by who died, for a snapshot or in the middle
    return sandbox


async def hand_over(spawner: Spawner, sandbox: Sandbox, slots: SlotPool) -> None:
    """Give a spawner what an earlier one held of a living sandbox.

    Raises:
        DsecError: naming the call that failed; the sandbox lives on without.
    """
    descriptors: list[int] = []
    try:
        descriptors.append(take_writable_layer(sandbox.pidfd))
        descriptors.append(open_network_namespace(sandbox.pidfd))
        base_id = slots.base_id(sandbox.slot)
        request = SpawnerRequest(kind=SpawnerKind.ADOPT, slot=sandbox.slot, base_id=base_id)
        await spawner.request(request, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def find_process(pids: Iterable[int], inode: int) -> int:
    """Return a pidfd of the living process among ``pids`` that has this inode, or -1."""
    for pid in pids:
        if pid <= 0:
            continue  # of a process namespace that is not ours
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        except OSError as error:
            raise from_os_error("pidfd_open", error, str(pid)) from error
        if inode_of(pidfd) == inode and is_alive(pidfd):
            return pidfd
        os.close(pidfd)
    return -1


def is_alive(pidfd: int) -> bool:
    """Return whether a process has not ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def take_control_socket(pidfd: int) -> int:
    """Return the daemon's end of the control socket, which PID 1 keeps; the caller closes it.

    Raises:
        DsecError: naming the call that failed.
    """
    descriptor = _take(pidfd, HOST_END_FD)
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family is socket.AF_UNIX and end.type is socket.SOCK_SEQPACKET:
                return descriptor
    except OSError as error:
        os.close(descriptor)
        raise from_os_error("pidfd_getfd", error, "control socket") from error
    os.close(descriptor)
    raise DsecError(
        ErrorCode.INTERNAL, f"descriptor {HOST_END_FD} of its PID 1 is no control socket"
    )


def take_writable_layer(pidfd: int) -> int:
    """Return the writable layer's mount, which PID 1 keeps; the caller closes it."""
    return _take(pidfd, WRITABLE_FD)


def open_network_namespace(pidfd: int) -> int:
    """Return a process's network namespace; the caller closes it."""
    try:
        return fcntl.ioctl(pidfd, _PIDFD_GET_NET_NAMESPACE, 0)
    except OSError as error:
        raise from_os_error("ioctl", error, "network namespace") from error


def base_id_of(pid: int) -> int | None:
    """Return the first host id of a process's user namespace; None when it is gone or has none."""
    try:
        text = Path(f"/proc/{pid}/uid_map").read_text()
    except OSError:
        return None
    lines = [line.split() for line in text.splitlines()]
    if len(lines) != 1 or lines[0][0] != "0":
        return None
    return int(lines[0][1])


def base_ids(unified: Path) -> Iterator[tuple[str, int]]:
    """Yield for each node of this host that has a living sandbox its name and the id of one.

    A node keeps to one block of ids, so one sandbox of each says which.
    """
    for name in list_directories(str(unified)):
        if not name.startswith("dsec-"):
            continue
        found = _first_base_id(str(unified / name))
        if found is not None:
            yield name.removeprefix("dsec-"), found


def _first_base_id(parent: str) -> int | None:
    for local in list_directories(parent):
        for pid in read_processes(f"{parent}/{local}"):
            found = base_id_of(pid)
            if found:  # 0 is a process that has no user namespace of its own
                return found
    return None


def _take(pidfd: int, number: int) -> int:
    descriptor: int = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise from_os_error("pidfd_getfd", OSError(code, os.strerror(code)), str(number))
    return descriptor
