"""The sandboxes' system call filter: one table, compiled to a search tree for the kernel.

A linear list of 300 rules costs 0.6 ms to install and tens of nanoseconds on each call; a balanced
tree over ranges of numbers costs a tenth and takes about eight comparisons.

Refused calls answer EPERM, as container engines do. Calls newer than the table answer ENOSYS. Calls
of another machine's convention (32-bit, x32) answer EPERM. ``clone3`` is allowed here for PID 1,
which needs it, and taken from every command by PID 1 itself: a filter cannot see its flags.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass
from typing import Final

from dsec_sandboxd.kernel.syscalls import AARCH64, NEWEST_KNOWN, X86_64

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP: Final = 0x05
_JUMP_EQUAL: Final = 0x15
_JUMP_GREATER_EQUAL: Final = 0x35
_JUMP_SET: Final = 0x45
_RETURN: Final = 0x06
_SHORT_JUMP_MAX: Final = 255

_NUMBER: Final = 0  # offsets in struct seccomp_data
_ARCHITECTURE: Final = 4
_ARGUMENTS: Final = 16

_ALLOW: Final[Instruction] = (_RETURN, 0, 0, 0x7FFF_0000)


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, 0x0005_0000 | error)


_PRETEND: Final = _refuse(0)
"""Answers success without doing anything."""


def _load_argument(index: int) -> Instruction:
    """Load an argument's low half: all arguments tested here are 32 bits wide in the kernel."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


_CLONE_NEW_NAMESPACES: Final = 0x7E02_0000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE: Final = 0
_RLIMIT_CORE: Final = 4
_PRIO_USER: Final = 2
_IOPRIO_WHO_USER: Final = 3
_IP_PROTOCOLS: Final = (0, 1, 6, 17, 58, 262)  # any, ICMP, TCP, UDP, ICMPv6, multipath TCP
_SOL_SOCKET: Final = 1
_SOCKET_FILTERS: Final = (
    26,
    50,
    51,
    52,
)  # SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF
_IPPROTO_IPV6: Final = 41
_IPV6_FLOWLABEL_MGR: Final = 32
_F_OFD_SETLK, _F_OFD_SETLKW = 37, 38
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_PERSONALITIES: Final = (0x0, 0x0008, 0x20000, 0x20008, 0xFFFF_FFFF)


def _deny_namespaces() -> list[Instruction]:
    """Nested user namespaces open kernel code that a sandbox has no business with."""
    return [
        _load_argument(0),
        (_JUMP_SET, 0, 1, _CLONE_NEW_NAMESPACES),
        _refuse(errno.EPERM),
        _ALLOW,
    ]


def _allow_families() -> list[Instruction]:
    """Unix, IP and routing netlink only: no network namespace confines AF_VSOCK or AF_ALG.

    Of IP only the protocols in use: asking for another makes the host's kernel load its module.
    The answer is that of a kernel built without the family: programs that would use one if it were
    there (``useradd`` asks for auditing) go on without.
    """
    last = len(_IP_PROTOCOLS) - 1
    tests = [(_JUMP_EQUAL, last - index + 1, 0, value) for index, value in enumerate(_IP_PROTOCOLS)]
    protocols = [_load_argument(2), *tests, _refuse(errno.EPROTONOSUPPORT), _ALLOW]
    return [
        _load_argument(0),
        (_JUMP_EQUAL, len(protocols) + 5, 0, _AF_UNIX),
        (_JUMP_EQUAL, 5, 0, _AF_INET),
        (_JUMP_EQUAL, 4, 0, _AF_INET6),
        (_JUMP_EQUAL, 0, 2, _AF_NETLINK),
        _load_argument(2),
        (_JUMP_EQUAL, len(protocols), 0, _NETLINK_ROUTE),
        _refuse(errno.EAFNOSUPPORT),
        *protocols,
    ]


def _deny_shared_socket_options() -> list[Instruction]:
    """Programs on sockets take from the node's one budget for compiled filters.

    Used up, no process of the node could install a system call filter any more. Labels of IPv6
    flows are few for the whole node, too.
    """
    count = len(_SOCKET_FILTERS)
    tests = [(_JUMP_EQUAL, count - index, 0, value) for index, value in enumerate(_SOCKET_FILTERS)]
    return [
        _load_argument(1),
        (_JUMP_EQUAL, 3, 0, _SOL_SOCKET),
        (_JUMP_EQUAL, 0, count + 3, _IPPROTO_IPV6),
        _load_argument(2),
        (_JUMP_EQUAL, count + 2, count + 1, _IPV6_FLOWLABEL_MGR),
        _load_argument(2),
        *tests,
        _ALLOW,
        _refuse(errno.EPERM),
    ]


def _allow_personalities() -> list[Instruction]:
    last = len(_PERSONALITIES) - 1
    tests = [
        (_JUMP_EQUAL, last - index + 1, 0, value) for index, value in enumerate(_PERSONALITIES)
    ]
    return [_load_argument(0), *tests, _refuse(errno.EPERM), _ALLOW]


def _deny_terminal_tricks() -> list[Instruction]:
    """No forged key strokes, and no line discipline: asking for one loads its module."""
    return [
        _load_argument(1),
        (_JUMP_EQUAL, 2, 0, _TIOCSTI),
        (_JUMP_EQUAL, 1, 0, _TIOCLINUX),
        (_JUMP_EQUAL, 0, 1, _TIOCSETD),
        _refuse(errno.EPERM),
        _ALLOW,
    ]


def _deny_locks_without_owner() -> list[Instruction]:
    """Locks of an open file description live on in a mapping, or in a message that nobody reads.

    The kernel limits no locks; those of processes can at least be told whose they are. The answer
    is that of a kernel without them.
    """
    return [
        _load_argument(1),
        (_JUMP_EQUAL, 1, 0, _F_OFD_SETLK),
        (_JUMP_EQUAL, 0, 1, _F_OFD_SETLKW),
        _refuse(errno.EINVAL),
        _ALLOW,
    ]


def _keep_core_limit() -> list[Instruction]:
    """The core limit stays 1: with 0, a piped core pattern runs its program on the host."""
    return [
        _load_argument(0),
        (_JUMP_EQUAL, 0, 1, _RLIMIT_CORE),
        _PRETEND,
        _ALLOW,
    ]


def _spare_init(argument: int) -> list[Instruction]:
    """Leave PID 1 as it is: its limits, priority and processors become those of every command.

    The kernel lets whoever has its user change them; tracing is not needed for it.
    """
    return [
        _load_argument(argument),
        (_JUMP_EQUAL, 0, 1, 1),
        _refuse(errno.EPERM),
        _ALLOW,
    ]


def _spare_init_and_users(argument: int, kind_of_user: int) -> list[Instruction]:
    """As :func:`_spare_init`, and not by way of all processes of a user either."""
    return [
        _load_argument(0),
        (_JUMP_EQUAL, 2, 0, kind_of_user),
        _load_argument(argument),
        (_JUMP_EQUAL, 0, 1, 1),
        _refuse(errno.EPERM),
        _ALLOW,
    ]


def _keep_core_limit_of_process() -> list[Instruction]:
    return [
        _load_argument(0),
        (_JUMP_EQUAL, 0, 5, 1),  # PID 1: its limits may only be asked for
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 2),
        (_JUMP_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 2 + 4),
        (_JUMP_EQUAL, 1, 0, 0),
        _refuse(errno.EPERM),
        _load_argument(1),
        (_JUMP_EQUAL, 0, 5, _RLIMIT_CORE),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 2),  # the new limit's address: both halves
        (_JUMP_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 2 + 4),
        (_JUMP_EQUAL, 1, 0, 0),
        _PRETEND,
        _ALLOW,
    ]


_CHECKED: Final = {
    "clone": _deny_namespaces(),
    "socket": _allow_families(),
    "personality": _allow_personalities(),
    "setsockopt": _deny_shared_socket_options(),
    "ioctl": _deny_terminal_tricks(),
    "fcntl": _deny_locks_without_owner(),
    "setrlimit": _keep_core_limit(),
    "prlimit64": _keep_core_limit_of_process(),
    "sched_setaffinity": _spare_init(0),
    "sched_setparam": _spare_init(0),
    "sched_setscheduler": _spare_init(0),
    "sched_setattr": _spare_init(0),
    "setpriority": _spare_init_and_users(1, _PRIO_USER),
    "ioprio_set": _spare_init_and_users(1, _IOPRIO_WHO_USER),
    # sync() waits for every tenant's dirty data, and so does syncfs() by way of the run directory,
    # which is a directory of the host; a sandbox's own layer is in memory.
    "sync": [_PRETEND],
    "syncfs": [_PRETEND],
    # The number of asynchronous contexts is limited for the whole node, not for each user.
    "io_setup": [_refuse(errno.ENOSYS)],
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A machine's calling convention."""

    audit: int
    numbers: dict[str, int]


ARCHITECTURES: Final = {
    "x86_64": Architecture(0xC000_003E, X86_64),
    "aarch64": Architecture(0xC000_00B7, AARCH64),
}


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers from ``start`` up to the next range's start, and what to do with them."""

    start: int
    program: list[Instruction]


def _ranges(numbers: dict[str, int]) -> list[_Range]:
    allowed = {number: _CHECKED.get(name, [_ALLOW]) for name, number in numbers.items()}
    denied = [_refuse(errno.EPERM)]
    found: list[_Range] = []
    for number in range(NEWEST_KNOWN + 1):
        program = allowed.get(number, denied)
        if not found or found[-1].program != program:
            found.append(_Range(number, program))
    return [
        *found,
        _Range(NEWEST_KNOWN + 1, [_refuse(errno.ENOSYS)]),
        _Range(0x4000_0000, denied),  # the x32 convention's bit
    ]


def _tree(ranges: list[_Range]) -> list[Instruction]:
    if len(ranges) == 1:
        return ranges[0].program
    middle = len(ranges) // 2
    low, high = _tree(ranges[:middle]), _tree(ranges[middle:])
    start = ranges[middle].start
    if len(low) <= _SHORT_JUMP_MAX:
        return [(_JUMP_GREATER_EQUAL, len(low), 0, start), *low, *high]
    return [(_JUMP_GREATER_EQUAL, 0, 1, start), (_JUMP, 0, 0, len(low)), *low, *high]


def compile_filter(machine: str = "") -> bytes:
    """Return the filter as an array of the kernel's ``struct sock_filter``.

    Args:
        machine: as ``uname -m`` says; this host's when empty.

    Raises:
        KeyError: a machine without a table.
    """
    architecture = ARCHITECTURES[machine or platform.machine()]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
        *_tree(_ranges(architecture.numbers)),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
