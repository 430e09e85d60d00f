"""Hearing of events inside the kernel: records of one tracepoint, from every processor.

A record is written by the kernel, field by field. A text interface (the kernel's log,
``trace_pipe``) would let a process forge lines with its name.

One ring of a few pages for each processor, read when the kernel says that something is in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import select
import struct
from operator import itemgetter
from pathlib import Path
from typing import Final

_FSOPEN: Final = 430  # the same numbers on every machine
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_FSCONFIG_CMD_CREATE: Final = 6
_CLOEXEC: Final = 1
_PERF_EVENT_OPEN: Final = {"x86_64": 298, "aarch64": 241}
_PERF_TYPE_TRACEPOINT: Final = 2
_PERF_SAMPLE_TIME: Final = 1 << 2
_PERF_SAMPLE_RAW: Final = 1 << 10
_PERF_FLAG_CLOEXEC: Final = 1 << 3
_PERF_RECORD_SAMPLE: Final = 9
_ATTRIBUTES: Final = struct.Struct("=2I5Q2IQ")
_HEADER: Final = struct.Struct("=IHH")  # a record's type, flags and size
_SAMPLE: Final = struct.Struct("=QI")  # when, and how long what follows is
_POSITIONS: Final = struct.Struct("=2Q")  # where the kernel writes, and how far we have read
_POSITIONS_AT: Final = 1024
_DATA_PAGES: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Tracepoint:
    """Tells of an event of the host, wherever it happens.

    Args:
        name: as below ``events`` of the kernel's trace file system, ``oom/mark_victim``.
        fields: of its record, to be read.
        every: one record for so many events of a processor.

    Raises:
        OSError: a kernel without the tracepoint or one of the fields, or one that does not let
            this process listen.
    """

    def __init__(self, name: str, fields: tuple[str, ...], *, every: int = 1) -> None:
        self._id, self._at = _read_layout(name, fields)
        self._every = every
        self._epoll = select.epoll()
        self._rings: dict[int, mmap.mmap] = {}
        try:
            for processor in _online_processors():
                self._open_ring(processor)
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when ``read`` has news."""
        return self._epoll.fileno()

    def read(self) -> list[Record]:
        """Return the records since the last call, the earliest first. Never waits."""
        found = [one for ring in self._rings.values() for one in _records(ring)]
        return [Record(data, self._at) for _, data in sorted(found, key=itemgetter(0))]

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for descriptor, ring in self._rings.items():
            ring.close()
            os.close(descriptor)
        self._rings.clear()
        self._epoll.close()

    def _open_ring(self, processor: int) -> None:
        attributes = _ATTRIBUTES.pack(
            _PERF_TYPE_TRACEPOINT,
            _ATTRIBUTES.size,
            self._id,
            self._every,
            _PERF_SAMPLE_TIME | _PERF_SAMPLE_RAW,
            0,
            0,
            1,  # wakes at every record
            0,
            0,
        )
        descriptor = _checked(
            _libc.syscall(
                _PERF_EVENT_OPEN[platform.machine()],
                attributes,
                -1,
                processor,
                -1,
                _PERF_FLAG_CLOEXEC,
            )
        )
        try:
            ring = mmap.mmap(descriptor, (1 + _DATA_PAGES) * mmap.PAGESIZE)
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        self._rings[descriptor] = ring
        self._epoll.register(descriptor, select.EPOLLIN)


class Record:
    """What the kernel wrote of one event."""

    def __init__(self, data: bytes, at: dict[str, int]) -> None:
        self._data = data
        self._at = at

    def number(self, field: str) -> int:
        """Return an unsigned field of 32 bits."""
        at = self._at[field]
        return int.from_bytes(self._data[at : at + 4], "little")

    def text(self, field: str) -> bytes:
        """Return a field that holds a string of any length."""
        location = self.number(field)
        start, size = location & 0xFFFF, location >> 16
        return self._data[start : start + size].split(b"\0")[0]


def _records(ring: mmap.mmap) -> list[tuple[int, bytes]]:
    """Take the samples that wait in a ring, each with its nanoseconds of the kernel's clock."""
    head, tail = _POSITIONS.unpack_from(ring, _POSITIONS_AT)
    if head == tail:
        return []
    size = _DATA_PAGES * mmap.PAGESIZE
    data = ring[mmap.PAGESIZE : mmap.PAGESIZE + size]
    start = tail % size
    waiting = (data[start:] + data[:start])[: head - tail]
    found: list[tuple[int, bytes]] = []
    while len(waiting) >= _HEADER.size:
        kind, _, length = _HEADER.unpack_from(waiting)
        if length < _HEADER.size:
            break
        if kind == _PERF_RECORD_SAMPLE:
            when, _ = _SAMPLE.unpack_from(waiting, _HEADER.size)
            found.append((when, waiting[_HEADER.size + _SAMPLE.size : length]))
        waiting = waiting[length:]
    struct.pack_into("=Q", ring, _POSITIONS_AT + 8, head)
    return found


def _read_layout(name: str, fields: tuple[str, ...]) -> tuple[int, dict[str, int]]:
    """Return the event's number and where its record keeps each field.

    They are read from a trace file system that nobody else sees.
    """
    context = _checked(_libc.syscall(_FSOPEN, b"tracefs", _CLOEXEC))
    try:
        _checked(_libc.syscall(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0))
        mount = _checked(_libc.syscall(_FSMOUNT, context, _CLOEXEC, 0))
    finally:
        os.close(context)
    try:
        path = f"events/{name}/format"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=mount)
        with os.fdopen(descriptor) as file:
            text = file.read()
    finally:
        os.close(mount)
    found = re.findall(r"\b(\w+)(?:\[\])?;\toffset:(\d+);", text)
    at = {field: int(place) for field, place in found if field in fields}
    event = re.search(r"^ID: (\d+)$", text, re.MULTILINE)
    if event is None or at.keys() != set(fields):
        raise OSError(f"the tracepoint {name} has no {', '.join(fields)}")
    return int(event.group(1)), at


def _online_processors() -> list[int]:
    found: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text().strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
