"""What is sent to PID 1, checked and packed, and the descriptors that come from it."""

from __future__ import annotations

import array
import os
import socket
from typing import TYPE_CHECKING, Final

from dsec_common.errors import invalid
from dsec_sandboxd.kernel.protocol import DESCRIPTORS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_sandboxd.kernel.interface import CommandSpec

ANCILLARY_BYTES: Final = socket.CMSG_LEN(DESCRIPTORS_MAX * array.array("i").itemsize)
"""The room that descriptors beside a packet may take."""


def check_command(spec: CommandSpec) -> None:
    """Return if PID 1 can be asked for a command.

    Raises:
        DsecError: ``invalid``.
    """
    if not spec.argv or not spec.argv[0]:
        raise invalid("a command needs at least the program to run in argv")
    for name in spec.env:
        if not name or "=" in name:
            raise invalid("an environment name is empty or holds '='")
    if not spec.cwd.startswith("/"):
        raise invalid(f"the working directory {spec.cwd!r} is not absolute")


def pack_strings(strings: Sequence[str]) -> bytes:
    """Return strings as PID 1 reads them, each with a NUL after it.

    Raises:
        DsecError: ``invalid`` when one holds a NUL itself.
    """
    joined = "\0".join(strings)
    if joined.count("\0") != len(strings) - 1:
        raise invalid("an argument, variable or path holds a NUL byte, which no program can get")
    return os.fsencode(joined) + b"\0"


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a packet."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)
