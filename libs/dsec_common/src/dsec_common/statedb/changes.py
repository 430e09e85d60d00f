"""What one write changes, checked and laid out for RocksDB.

A batch is checked and encoded as a whole where that is cheaper than key by key: Python's own work
is most of what a small value costs beside RocksDB's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from rocksdict import WriteBatch

from dsec_common.errors import DsecError, invalid
from dsec_common.statedb.keys import (
    BATCH_BYTES_MAX,
    DELETED,
    EXPIRING,
    KEY_BYTES_MAX,
    VALUE,
    VALUE_BYTES_MAX,
    encoded_key,
    ending,
    expiring,
    too_large,
)

TTL_MAX_S: Final = 10 * 365 * 86_400.0


class Changes(NamedTuple):
    """What one atomic write changes in one namespace.

    Attributes:
        puts: values by key.
        deletes: keys that have no value afterwards; they need not have one before.
        ttl_s: seconds after which what is put is absent again; 0 for never.
        dependencies: versions that this one must not be behind, by any name.
    """

    puts: Mapping[str, bytes] = {}
    deletes: Collection[str] = ()
    ttl_s: float = 0.0
    dependencies: Mapping[str, int] | None = None


def add_changes(
    batch: WriteBatch, changes: Changes, data: bytes, version: int, now_s: float
) -> int:
    """Add changes to a batch, and return the bytes of their keys and values.

    Args:
        batch: where to.
        changes: of one namespace.
        data: what all keys of the namespace begin with.
        version: of all that is changed.
        now_s: Unix time that a time to live counts from.

    Raises:
        DsecError: ``invalid`` for what cannot be kept; the batch is not to be used then.
    """
    puts, deletes, ttl_s, _ = changes
    if not 0 <= ttl_s <= TTL_MAX_S:  # also for what is not a number
        raise invalid(f"a value lives 0 to {TTL_MAX_S:.0f} s, not {ttl_s}")
    if deletes and not puts.keys().isdisjoint(deletes):
        twice = min(puts.keys() & set(deletes))
        raise invalid(f"{twice!r} is put and deleted in one write")
    put = batch.put
    size = 0
    if puts:
        values: Collection[bytes] = puts.values()
        keys, size = _encoded_keys(puts)
        size += sum(map(len, values))
        if size > VALUE_BYTES_MAX:
            _check_sizes(puts, size)
        end = ending(version, EXPIRING if ttl_s else VALUE)
        if ttl_s:
            expires_ms = math.ceil((now_s + ttl_s) * 1000)
            values = [expiring(value, expires_ms) for value in values]
        for key, value in zip(keys, values, strict=True):
            put(data + key + end, value)
    if deletes:
        end = ending(version, DELETED)
        keys, deleted_bytes = _encoded_keys(deletes)
        size += deleted_bytes
        for key in keys:
            put(data + key + end, b"")
    return size


def too_much() -> DsecError:
    """Return the error for a write above :data:`BATCH_BYTES_MAX`."""
    return invalid(
        f"one write has at most {BATCH_BYTES_MAX} bytes of keys and values: divide it, or keep "
        "what is large elsewhere",
        limit=BATCH_BYTES_MAX,
    )


def _check_sizes(puts: Mapping[str, bytes], size: int) -> None:
    key, value = max(puts.items(), key=lambda item: len(item[1]))
    if len(value) > VALUE_BYTES_MAX:
        raise too_large(key, value)
    if size > BATCH_BYTES_MAX:
        raise too_much()


def _encoded_keys(keys: Collection[str]) -> tuple[list[bytes], int]:
    """Return keys as they are stored, and their bytes in all."""
    try:
        joined = "\0".join(keys).encode()
    except UnicodeEncodeError:
        joined = b""
    encoded = joined.split(b"\0")
    count = len(keys)
    if len(encoded) != count or b"" in encoded or max(map(len, encoded)) > KEY_BYTES_MAX:
        encoded = list(map(encoded_key, keys))  # one of them is not fine: it says which
    return encoded, len(joined) - count + 1
