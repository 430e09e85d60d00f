"""How much more a node's record takes: it is one message, and the bus takes none over 1 MiB.

A record that had grown beyond would keep nothing any more, not even the end of a lease. So a lease
is granted only where there is room for all that can still become of those that are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

import msgspec

RECORD_BYTES_MAX: Final = 960 * 1024
"""Of a record; the rest of a message is for headers."""

GRANT_BYTES_MAX: Final = 832 * 1024
"""Beyond this nothing is granted. What is left is for what is handed on, unlocked and resized."""

_encoder: Final = msgspec.msgpack.Encoder()


def bytes_of(*entries: msgspec.Struct) -> int:
    """Return how many bytes of a record the entries are."""
    return sum(len(_encoder.encode(entry)) for entry in entries)


class Room:
    """The bytes of what stands in a record, by key; each entry costs one encoding of itself."""

    def __init__(self) -> None:
        self._bytes: dict[Hashable, int] = {}
        self._total = 0

    def keep(self, key: Hashable, entry: msgspec.Struct, *, copies: int = 1) -> None:
        """Count an entry, instead of what was counted under its key before, so many times."""
        size = copies * bytes_of(entry)
        self._total += size - self._bytes.get(key, 0)
        self._bytes[key] = size

    def drop(self, key: Hashable) -> None:
        """Count an entry no longer; one that is not counted is fine."""
        self._total -= self._bytes.pop(key, 0)

    def has(self, more_bytes: int, of_bytes: int, *, without: Iterable[Hashable] = ()) -> bool:
        """Return whether so many bytes more, but without these entries, are within ``of_bytes``."""
        gone = sum(self._bytes.get(key, 0) for key in without)
        return self._total - gone + more_bytes <= of_bytes
