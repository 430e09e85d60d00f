"""How state is laid out in RocksDB: format 1.

    header      h                                           the format's number, 4 bytes
    namespace   m <namespace> 00                            no version above it was given out yet
    snapshot    s <namespace> 00 <version>                  (empty)
    branch      b <namespace> 00 <version of the rollback>  the version it went back to
    data        d <namespace> 00 <key> 00 <inverted version> <kind>  what was put

Namespaces and keys are UTF-8 without NUL, so the first two NULs of a data key end them, whatever
they are: no key of one namespace is a key of another, and keys sort as their text does, by code
point. Numbers are 8 bytes, the greatest first; a version is inverted (2^64 - 1 - version), so that
a key's newest version is the first that a seek finds. The kind, 1 byte, is 0 for a deletion, 1 for
a value and 2 for a value behind its expiry (Unix time in milliseconds, 8 bytes).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from dsec_common.errors import DsecError, invalid

FORMAT: Final = 1
HEADER: Final = b"h"
META: Final = b"m"
SNAPSHOT: Final = b"s"
BRANCH: Final = b"b"
DATA: Final = b"d"
END: Final = b"\0"
AFTER_END: Final = b"\1"
"""In the place of a name's :data:`END` it sorts behind all that begins with name and END."""

LAST_VERSION: Final = 2**64 - 1
SUFFIX_BYTES: Final = 9
"""Of a data key: inverted version and kind."""

DELETED: Final = 0
VALUE: Final = 1
EXPIRING: Final = 2
_EXPIRY_BYTES: Final = 8

NAMESPACE_BYTES_MAX: Final = 255
KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 63 * 1024
BATCH_BYTES_MAX: Final = 64 * 1024
"""Keys and values of one write: what RocksDB takes in well under a millisecond, Python waiting."""

_FORMAT: Final = struct.Struct(">I")
_NUMBER: Final = struct.Struct(">Q")


class Record(NamedTuple):
    """A stored value.

    Attributes:
        value: None when this version deleted the key.
        expires_ms: Unix time from which on it is absent; 0 for never.
    """

    value: bytes | None
    expires_ms: int

    def is_absent(self, now_ms: int) -> bool:
        """Return whether a reader sees no value."""
        return self.value is None or 0 < self.expires_ms <= now_ms


def encoded_namespace(name: str) -> bytes:
    """Return a namespace's name as bytes.

    Raises:
        DsecError: ``invalid`` for a name that is empty, too long, or not text that can be kept.
    """
    return _encoded("namespace", name, NAMESPACE_BYTES_MAX)


def encoded_key(key: str) -> bytes:
    """Return a key as bytes.

    Raises:
        DsecError: ``invalid``, as of :func:`encoded_namespace`.
    """
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        encoded = b""
    if 0 < len(encoded) <= KEY_BYTES_MAX and b"\0" not in encoded:
        return encoded
    return _encoded("key", key, KEY_BYTES_MAX)


def encoded_prefix(prefix: str) -> bytes:
    """Return what a key may begin with as bytes; nothing is fine.

    Raises:
        DsecError: ``invalid``, as of :func:`encoded_namespace`.
    """
    return _encoded("prefix of keys", prefix, KEY_BYTES_MAX) if prefix else b""


def _encoded(what: str, name: str, bytes_max: int) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"the {what} {name!r} is not text that UTF-8 can write") from error
    if not encoded or len(encoded) > bytes_max or b"\0" in encoded:
        raise invalid(
            f"a {what} is 1 to {bytes_max} bytes of UTF-8 without NUL, not {name!r}",
            bytes=len(encoded),
        )
    return encoded


def too_large(key: str, value: bytes) -> DsecError:
    """Return the error for a value above :data:`VALUE_BYTES_MAX`."""
    return invalid(
        f"the value of {key!r} has {len(value)} bytes, more than {VALUE_BYTES_MAX}: keep it "
        "elsewhere, and its name here",
        bytes=len(value),
        limit=VALUE_BYTES_MAX,
    )


def inverted(version: int) -> bytes:
    """Return a version as it stands in a data key."""
    return (LAST_VERSION - version).to_bytes(8, "big")


def ending(version: int, kind: int) -> bytes:
    """Return what ends a data key: NUL, the inverted version, the kind."""
    return ((LAST_VERSION - version) << 8 | kind).to_bytes(1 + SUFFIX_BYTES, "big")


def version_of(stored: bytes) -> int:
    """Return the version in a data key."""
    return LAST_VERSION - int.from_bytes(stored[-SUFFIX_BYTES:-1], "big")


def packed(number: int) -> bytes:
    """Return a number as it is stored outside data keys."""
    return _NUMBER.pack(number)


def unpacked(stored: bytes) -> int:
    """Return the number that :func:`packed` wrote."""
    return int.from_bytes(stored, "big")


def packed_format(number: int) -> bytes:
    """Return the header's value."""
    return _FORMAT.pack(number)


def expiring(value: bytes, expires_ms: int) -> bytes:
    """Return the stored form of a value with an end."""
    return _NUMBER.pack(expires_ms) + value


def record_of(stored: bytes, value: bytes) -> Record:
    """Return what a data key and its value say.

    Raises:
        DsecError: ``internal`` for a kind that this version does not know.
    """
    kind = stored[-1]
    if kind == VALUE:
        return Record(value, 0)
    if kind == EXPIRING and len(value) >= _EXPIRY_BYTES:
        return Record(value[_EXPIRY_BYTES:], unpacked(value[:_EXPIRY_BYTES]))
    if kind == DELETED:
        return Record(None, 0)
    from dsec_common.statedb.engine import damaged  # noqa: PLC0415  only damage pays for the cycle

    raise damaged(f"a value of the unknown kind {kind}")
