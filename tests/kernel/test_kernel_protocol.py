"""The Python side of the protocol says what the C header says; the filter decides as it should."""

from __future__ import annotations

import errno
import hashlib
import re
import struct
import subprocess
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from dsec_sandboxd.kernel import protocol
from dsec_sandboxd.kernel.linux import PROGRAMS
from dsec_sandboxd.kernel.seccomp import ARCHITECTURES, compile_filter
from dsec_sandboxd.kernel.syscalls import AARCH64, X86_64

NATIVE = PROGRAMS.parent
HEADER = (NATIVE / "protocol.h").read_text()
ALLOW = 0x7FFF_0000
REFUSE = 0x0005_0000


def enumeration(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    assert body is not None
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body[1])}


def test_steps_have_the_same_names_in_the_same_order() -> None:
    assert tuple(re.findall(r"X\((\w+)\)", HEADER)) == protocol.STEPS


@pytest.mark.parametrize(
    ("name", "prefix", "python"),
    [
        ("spawner_request_kind", "SPAWNER_", protocol.SpawnerKind),
        ("spawner_lend_flags", "", protocol.Lending),
        ("control_request_kind", "CONTROL_", protocol.ControlKind),
        ("control_flags", "CONTROL_", protocol.ControlFlag),
        ("control_reply_kind", "CONTROL_", protocol.ReplyKind),
        ("file_operation", "FILE_", protocol.FileOperation),
        ("listed_flags", "LISTED_", protocol.ListedFlag),
        ("exited_flags", "EXITED_", protocol.ExitedFlag),
    ],
)
def test_enumerations_agree(name: str, prefix: str, python: type[IntEnum | IntFlag]) -> None:
    members = {f"{prefix}{key}": int(value) for key, value in python.__members__.items()}
    members.pop("SPAWNER_HELLO", None)
    members.pop("CONTROL_NONE", None)
    assert enumeration(name) == members


#: What each protocol is, by its number: a hash of its part of the header without comments.
PROTOCOLS = {
    ("SPAWNER", "daemon <-> spawner", 2): "f63ca5ad882edf2a",
    ("CONTROL", "daemon <-> PID 1", 1): "23f71b7cf6a1bddc",
}


@pytest.mark.parametrize(("name", "title", "number"), PROTOCOLS)
def test_packets_change_only_with_the_number_of_their_protocol(
    name: str, title: str, number: int
) -> None:
    defined = re.search(rf"#define DSEC_{name}_PROTOCOL (\d+)", HEADER)
    assert defined is not None
    assert int(defined[1]) == number == getattr(protocol, f"{name}_PROTOCOL")
    part = HEADER.partition(f"/* ---- {title} ---- */")[2].partition("/* ----")[0]
    without_comments = re.sub(r"/\*.*?\*/", "", part, flags=re.DOTALL)
    said = hashlib.sha256("".join(without_comments.split()).encode()).hexdigest()[:16]
    # Others' programs would misread what has changed: give it the next number, here as well. What
    # is merely added to what is said to PID 1 leaves the number as it is.
    assert said == PROTOCOLS[name, title, number]


def test_structures_have_the_same_size(tmp_path: Path) -> None:
    program = tmp_path / "sizes.c"
    program.write_text(
        '#include <stdio.h>\n#include "protocol.h"\n'
        'int main(void) { return printf("%zu %zu %zu %zu", sizeof(struct spawner_request),'
        " sizeof(struct spawner_reply), sizeof(struct control_request),"
        " sizeof(struct control_reply)) < 0; }\n"
    )
    binary = tmp_path / "sizes"
    subprocess.run(["cc", f"-I{NATIVE}", program, "-o", binary], check=True)
    said = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()
    request = protocol.SpawnerRequest(kind=protocol.SpawnerKind.DROP).pack(1)
    control = protocol.pack_control(protocol.ControlKind.DONE, 1)
    assert [int(size) for size in said] == [
        len(request),
        protocol.SPAWNER_REPLY_BYTES,
        len(control),
        protocol.CONTROL_REPLY_BYTES,
    ]


def decide(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """Run a filter as the kernel would."""
    padded = [*arguments, *([0] * (6 - len(arguments)))]
    data = struct.pack("=IIQ6Q", number & 0xFFFF_FFFF, audit, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", program))
    at, accumulator = 0, 0
    while True:
        code, on_true, on_false, constant = instructions[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, constant)[0]
        elif code == 0x05:
            at += constant
        elif code == 0x15:
            at += on_true if accumulator == constant else on_false
        elif code == 0x35:
            at += on_true if accumulator >= constant else on_false
        elif code == 0x45:
            at += on_true if accumulator & constant else on_false
        else:
            assert code == 0x06
            return int(constant)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_each_number_as_its_table_says(machine: str) -> None:
    program, table = compile_filter(machine), ARCHITECTURES[machine]
    names = {number: name for name, number in table.numbers.items()}
    checked = {
        "clone",
        "socket",
        "setsockopt",
        "personality",
        "ioctl",
        "fcntl",
        "setrlimit",
        "prlimit64",
        "sync",
        "syncfs",
        "io_setup",
    }
    for number in range(-1, 600):
        verdict = decide(program, table.audit, number)
        if names.get(number) in checked:
            continue
        if number < 0 or number <= 462:
            expected = ALLOW if number in names else REFUSE | errno.EPERM
        else:
            expected = REFUSE | errno.ENOSYS
        assert verdict == expected, (number, names.get(number))
    assert decide(program, table.audit, 0x4000_0001) == REFUSE | errno.EPERM
    assert decide(program, 0x4000_0003, 1) == REFUSE | errno.EPERM  # 32-bit


@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("fcntl", (3, 6), ALLOW),  # a lock of the process
        ("fcntl", (3, 36), ALLOW),
        ("fcntl", (3, 37), REFUSE | errno.EINVAL),  # of an open file description
        ("fcntl", (3, 38), REFUSE | errno.EINVAL),
        ("clone", (17,), ALLOW),
        ("clone", (0x1000_0011,), REFUSE | errno.EPERM),
        ("clone", (0x0200_0000,), REFUSE | errno.EPERM),
        ("socket", (1, 1), ALLOW),
        ("socket", (2, 1), ALLOW),
        ("socket", (10, 2), ALLOW),
        ("socket", (16, 3, 0), ALLOW),
        ("socket", (16, 3, 12), REFUSE | errno.EAFNOSUPPORT),
        ("socket", (17, 3), REFUSE | errno.EAFNOSUPPORT),
        ("socket", (38, 5), REFUSE | errno.EAFNOSUPPORT),
        ("socket", (40, 1), REFUSE | errno.EAFNOSUPPORT),
        ("socket", (1, 1, 0), ALLOW),
        ("socket", (2, 1, 6), ALLOW),
        ("socket", (2, 1, 262), ALLOW),
        ("socket", (10, 2, 17), ALLOW),
        ("socket", (2, 1, 132), REFUSE | errno.EPROTONOSUPPORT),
        ("socket", (10, 2, 136), REFUSE | errno.EPROTONOSUPPORT),
        ("setsockopt", (3, 1, 2), ALLOW),
        ("setsockopt", (3, 6, 26), ALLOW),
        ("setsockopt", (3, 1, 26), REFUSE | errno.EPERM),
        ("setsockopt", (3, 1, 50), REFUSE | errno.EPERM),
        ("setsockopt", (3, 1, 51), REFUSE | errno.EPERM),
        ("setsockopt", (3, 1, 52), REFUSE | errno.EPERM),
        ("setsockopt", (3, 1, 53), ALLOW),
        ("personality", (0xFFFF_FFFF,), ALLOW),
        ("personality", (0,), ALLOW),
        ("personality", (0x0040_0000,), REFUSE | errno.EPERM),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), REFUSE | errno.EPERM),
        ("ioctl", (0, 0x5423), REFUSE | errno.EPERM),
        ("ioctl", (0, 0x541C), REFUSE | errno.EPERM),
        ("ioctl", (0, 0x5413), ALLOW),
        ("ioctl", (0, 0xFFFF_FFFF_0000_5412), REFUSE | errno.EPERM),
        ("prlimit64", (0, 7, 1), ALLOW),
        ("prlimit64", (0, 4, 0), ALLOW),
        ("prlimit64", (0, 4, 1), REFUSE),
        ("prlimit64", (0, 4, 1 << 40), REFUSE),
        ("setrlimit", (4, 1), REFUSE),
        ("setrlimit", (7, 1), ALLOW),
        ("sync", (), REFUSE),
        ("syncfs", (3,), REFUSE),
        ("io_setup", (1, 0), REFUSE | errno.ENOSYS),
    ],
)
def test_calls_with_a_condition_are_decided_by_their_arguments(
    name: str, arguments: tuple[int, ...], verdict: int
) -> None:
    for machine in ("x86_64", "aarch64"):
        table = ARCHITECTURES[machine]
        program = compile_filter(machine)
        assert decide(program, table.audit, table.numbers[name], *arguments) == verdict, machine


@pytest.mark.parametrize("table", [X86_64, AARCH64])
def test_no_table_names_what_must_stay_closed(table: dict[str, int]) -> None:
    mounting = {"mount", "umount2", "move_mount", "open_tree", "fsopen", "fsmount", "fsconfig"}
    namespaces = {"mount_setattr", "unshare", "setns", "pivot_root", "open_by_handle_at"}
    kernel = {"bpf", "perf_event_open", "init_module", "finit_module", "kexec_load", "reboot"}
    keys = {"keyctl", "add_key", "request_key", "syslog", "swapon", "quotactl"}
    memory = {"io_uring_setup", "userfaultfd", "pidfd_getfd"}
    closed = mounting | namespaces | kernel | keys | memory
    assert not closed & set(table)
    assert len(set(table.values())) == len(table)
