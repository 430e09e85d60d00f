"""The container of a package: a ZIP archive each byte of which follows from its entries.

Any tool opens it. Reading is stricter than ZIP is: entries lie one after the other without a gap,
headers say the same twice, and there are no comments, extra fields, times, links, encryption or
bytes before and after. So two readers never see two different packages in one file, and no entry
lies within another. Sizes are added up before the first byte is unpacked, and no entry gives more
than it said.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dsec.pack.errors import refused
from dsec.pack.paths import check_path, check_tree

ENTRIES_MAX: Final = 20_000
"""The most files of one package."""

UNPACKED_MAX_BYTES: Final = 256 * 1024 * 1024
"""The most that all files of one package may have together, unpacked."""

_STORED: Final = 0
_DEFLATED: Final = 8
_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<IHHHHIIH")
_LOCAL_MARK: Final = 0x04034B50
_CENTRAL_MARK: Final = 0x02014B50
_END_MARK: Final = 0x06054B50
_NEEDED: Final = 20
_MADE_ON_UNIX: Final = (3 << 8) | _NEEDED
_NAMES_ARE_UTF8: Final = 1 << 11
#: 1980-01-01, the first day that ZIP knows: a package has no time.
_DAY: Final = 0x21
_FILE: Final = 0o100644 << 16
_PROGRAM: Final = 0o100755 << 16
_LEVEL: Final = 9
_RAW: Final = -15


@dataclass(frozen=True, slots=True)
class Entry:
    """One file as it lies in the container.

    Attributes:
        name: its path, with ``/``.
        body: its content, deflated or as it is.
        size_bytes: of its content.
        checksum: CRC-32 of its content.
        deflated: what ``body`` is.
        executable: whether it may be run.
    """

    name: str
    body: bytes
    size_bytes: int
    checksum: int
    deflated: bool
    executable: bool = False

    def content(self) -> bytes:
        """Return the content, of exactly the size that the entry says.

        Raises:
            DsecError: ``invalid`` when it unpacks to anything else.
        """
        content = _inflated(self.body, self.size_bytes, self.name) if self.deflated else self.body
        if len(content) != self.size_bytes or zlib.crc32(content) != self.checksum:
            raise refused("damaged", f"{self.name} is damaged: its checksum is another")
        return content


def deflated(content: bytes) -> bytes:
    """Return content packed as this container packs it."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW)
    return packer.compress(content) + packer.flush()


def entry_of(name: str, content: bytes, *, executable: bool = False, packed: bytes = b"") -> Entry:
    """Return the entry of a file; ``packed`` is what :func:`deflated` made of it, if known."""
    body = packed or deflated(content)
    is_smaller = len(body) < len(content)
    return Entry(
        name=name,
        body=body if is_smaller else content,
        size_bytes=len(content),
        checksum=zlib.crc32(content),
        deflated=is_smaller,
        executable=executable,
    )


def write_container(entries: Iterable[Entry]) -> bytes:
    """Return the container of entries, in this order."""
    whole, index = bytearray(), bytearray()
    count = 0
    for entry in entries:
        index += _central_header(entry, len(whole))
        whole += _local_header(entry) + entry.body
        count += 1
    end = _END.pack(_END_MARK, 0, 0, count, count, len(index), len(whole), 0)
    return bytes(whole + index + end)


def read_container(data: bytes, *, max_bytes: int) -> tuple[Entry, ...]:
    """Return the entries of a container; nothing is unpacked.

    Raises:
        DsecError: ``invalid`` for whatever :func:`write_container` would not have written.
    """
    if len(data) > max_bytes:
        raise refused("too_large", f"it has {len(data)} bytes: at most {max_bytes} are read")
    count, index_bytes, index_at = _read_end(data)
    entries: list[Entry] = []
    at, total = index_at, 0
    body_at = 0
    for _ in range(count):
        entry, at = _read_entry(data, at, body_at, index_at)
        total += entry.size_bytes
        if total > UNPACKED_MAX_BYTES:
            raise refused(
                "bomb", f"its files have more than {UNPACKED_MAX_BYTES} bytes when unpacked"
            )
        body_at += len(_local_header(entry)) + len(entry.body)
        entries.append(entry)
    if body_at != index_at or at != index_at + index_bytes:
        raise refused("damaged", "there are bytes between its files that belong to none")
    check_tree(entry.name for entry in entries)
    return tuple(entries)


def _read_end(data: bytes) -> tuple[int, int, int]:
    """Return how many entries there are, and the size and place of their index."""
    if len(data) < _END.size:
        raise refused("not_a_package", "it is no package: it is too short")
    if int.from_bytes(data[:4], "little") not in {_LOCAL_MARK, _END_MARK}:
        raise refused("not_a_package", "it is no package: it does not begin like one")
    mark, disk, first, here, count, index_bytes, index_at, comment = _END.unpack(data[-_END.size :])
    if mark != _END_MARK or comment:
        raise refused(
            "trailing_bytes", "it does not end where a package ends: bytes were lost or added"
        )
    if disk or first or here != count or index_at + index_bytes + _END.size != len(data):
        raise refused("damaged", "its end does not say where its index is")
    if count > ENTRIES_MAX:
        raise refused("bomb", f"it has {count} files: at most {ENTRIES_MAX} are read")
    return count, index_bytes, index_at


def _read_entry(data: bytes, at: int, body_at: int, index_at: int) -> tuple[Entry, int]:
    """Return the entry whose header in the index is at ``at``, and where the next one is."""
    if at + _CENTRAL.size > len(data) - _END.size:
        raise refused("damaged", "its index is cut off")
    fields = _CENTRAL.unpack_from(data, at)
    method, checksum, packed, size, name_bytes = fields[4], *fields[7:11]
    name_at = at + _CENTRAL.size
    name = _name_of(data[name_at : name_at + name_bytes])
    start = body_at + _LOCAL.size + name_bytes
    if start + packed > index_at:
        raise refused("damaged", f"{name} does not fit between its neighbours")
    entry = Entry(
        name=name,
        body=data[start : start + packed],
        size_bytes=size,
        checksum=checksum,
        deflated=method == _DEFLATED,
        executable=fields[15] == _PROGRAM,
    )
    if data[at : name_at + name_bytes] != _central_header(entry, body_at):
        raise refused("unusual", f"{name} is no plain file, or its header says something unusual")
    if data[body_at:start] != _local_header(entry):
        raise refused("unusual", f"what the index says of {name} is not what its header says")
    if not entry.deflated and packed != size:
        raise refused("damaged", f"{name} has two sizes")
    return entry, name_at + name_bytes


def _name_of(raw: bytes) -> str:
    try:
        return check_path(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise refused("bad_path", f"{raw[:64]!r} is no name of a file: it is no UTF-8") from None


def _local_header(entry: Entry) -> bytes:
    name = entry.name.encode()
    return (
        _LOCAL.pack(
            _LOCAL_MARK,
            _NEEDED,
            _NAMES_ARE_UTF8,
            _DEFLATED if entry.deflated else _STORED,
            0,
            _DAY,
            entry.checksum,
            len(entry.body),
            entry.size_bytes,
            len(name),
            0,
        )
        + name
    )


def _central_header(entry: Entry, offset: int) -> bytes:
    name = entry.name.encode()
    return (
        _CENTRAL.pack(
            _CENTRAL_MARK,
            _MADE_ON_UNIX,
            _NEEDED,
            _NAMES_ARE_UTF8,
            _DEFLATED if entry.deflated else _STORED,
            0,
            _DAY,
            entry.checksum,
            len(entry.body),
            entry.size_bytes,
            len(name),
            0,
            0,
            0,
            0,
            _PROGRAM if entry.executable else _FILE,
            offset,
        )
        + name
    )


def _inflated(body: bytes, size: int, name: str) -> bytes:
    unpacker = zlib.decompressobj(_RAW)
    try:
        # One byte more than it may have: so a stream that would go on is seen, and stopped.
        content = unpacker.decompress(body, size + 1)
    except zlib.error as error:
        raise refused("damaged", f"{name} is damaged: {error}") from None
    if len(content) > size or unpacker.unconsumed_tail:
        raise refused("bomb", f"{name} unpacks to more than the {size} bytes that it says")
    if not unpacker.eof or unpacker.unused_data:
        raise refused("damaged", f"{name} is damaged: its packed content does not end with it")
    return content
