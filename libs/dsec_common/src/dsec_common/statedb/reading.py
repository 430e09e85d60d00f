"""Reading versions: a key at a view, pages of keys, what differs between two views, history.

Every function runs at once and is bounded: a page ends after so many keys, bytes, or keys looked
at, and tells where to go on.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dsec_common.errors import invalid
from dsec_common.statedb.engine import Engine, Iterator
from dsec_common.statedb.keys import (
    AFTER_END,
    END,
    LAST_VERSION,
    SUFFIX_BYTES,
    Record,
    encoded_key,
    encoded_prefix,
    inverted,
    record_of,
    version_of,
)
from dsec_common.statedb.lineage import View

PAGE_KEYS_MAX: Final = 1000
PAGE_BYTES_MAX: Final = 256 * 1024
_EXAMINED_MAX: Final = 10_000


class Entry(NamedTuple):
    """A key as it is at some moment.

    Attributes:
        value: None when it was deleted, or has expired.
        version: of the write that made it so.
        expires_at: Unix time in seconds from which on it is absent; 0 for never.
    """

    key: str
    value: bytes | None
    version: int
    expires_at: float


class Page(NamedTuple):
    """Some keys in order.

    Attributes:
        after: what to ask for the next page with; None when this is the last. A page may be short,
            or empty, and not the last: most of what it looked at was deleted.
    """

    entries: tuple[Entry, ...]
    after: str | None


class Difference(NamedTuple):
    """A key that two moments do not agree on; None where it is absent."""

    key: str
    before: bytes | None
    after: bytes | None


class DiffPage(NamedTuple):
    """Some differences in order of keys; ``after`` as of :class:`Page`."""

    differences: tuple[Difference, ...]
    after: str | None


class Reader:
    """Reads the data of one namespace.

    Args:
        engine: whose data.
        data: what all keys of the namespace begin with.
    """

    def __init__(self, engine: Engine, data: bytes) -> None:
        self._engine = engine
        self._data = data

    def entry(self, key: str, view: View, now_ms: int) -> Entry | None:
        """Return what a view sees under a key, a deletion included; None when it never was."""
        head = self._data + encoded_key(key) + END
        iterator = self._engine.iterate()
        found = _seek(iterator, head, view)
        if found is None:
            self._engine.check(iterator)
            return None
        return _entry(key, found, record_of(iterator.key(), iterator.value()), now_ms)

    def history(self, key: str, view: View, limit: int, now_ms: int) -> tuple[Entry, ...]:
        """Return what a view sees of a key's past, the newest first."""
        head = self._data + encoded_key(key) + END
        iterator = self._engine.iterate()
        entries: list[Entry] = []
        found = _seek(iterator, head, view)
        while found is not None and len(entries) < limit:
            entries.append(_entry(key, found, record_of(iterator.key(), iterator.value()), now_ms))
            found = _seek(iterator, head, view, found - 1) if found > 1 else None
        self._engine.check(iterator)
        return tuple(entries)

    def scan(self, prefix: str, view: View, after: str | None, limit: int, now_ms: int) -> Page:
        """Return a page of the keys that have a value."""
        walk = _Walk(self._engine, self._data, prefix, after, limit)
        entries: list[Entry] = []
        while (key := walk.key) is not None and not walk.is_full(len(entries)):
            found = _seek(walk.iterator, walk.head, view, within=walk.version)
            if found is not None:
                record = record_of(walk.iterator.key(), walk.iterator.value())
                if not record.is_absent(now_ms):
                    entry = _entry(key, found, record, now_ms)
                    entries.append(entry)
                    walk.size += len(key) + len(entry.value or b"")
            walk.step(at=found)
        return Page(tuple(entries), walk.after)

    def diff(self, before: View, now: View, after: str | None, limit: int, now_ms: int) -> DiffPage:
        """Return a page of the keys whose value is not the same in two views."""
        walk = _Walk(self._engine, self._data, "", after, limit)
        same_until = before.agrees_until(now)
        differences: list[Difference] = []
        while (key := walk.key) is not None and not walk.is_full(len(differences)):
            at: int | None = walk.version
            if walk.version > same_until:
                then = self._value(walk.iterator, walk.head, before, now_ms)
                today = self._value(walk.iterator, walk.head, now, now_ms)
                if then != today:
                    differences.append(Difference(key, then, today))
                    walk.size += len(key) + len(then or b"") + len(today or b"")
                at = None
            walk.step(at=at)
        return DiffPage(tuple(differences), walk.after)

    @staticmethod
    def _value(iterator: Iterator, head: bytes, view: View, now_ms: int) -> bytes | None:
        if _seek(iterator, head, view) is None:
            return None
        record = record_of(iterator.key(), iterator.value())
        return None if record.is_absent(now_ms) else record.value


class _Walk:
    """From key to key of a namespace, whatever the number of their versions.

    Attributes:
        key: the present one; None at the end.
        head: its stored form without a version.
        version: its newest one, dead or not.
        size: bytes of the page so far; the caller adds to it.
    """

    def __init__(
        self, engine: Engine, data: bytes, prefix: str, after: str | None, limit: int
    ) -> None:
        if not 1 <= limit <= PAGE_KEYS_MAX:
            raise invalid(f"a page has 1 to {PAGE_KEYS_MAX} keys, not {limit}")
        self._engine = engine
        self._skip = len(data)
        self._begin = data + encoded_prefix(prefix)
        self._limit = limit
        self._examined = 0
        self._last: str | None = after
        self.iterator = engine.iterate()
        self.size = 0
        begin = self._begin
        if after:
            begin = max(begin, data + encoded_key(after) + AFTER_END)
        self.iterator.seek(begin)
        self._read()

    @property
    def after(self) -> str | None:
        """Where the next page goes on; None at the end."""
        return None if self.key is None else self._last

    def is_full(self, count: int) -> bool:
        """Return whether a page of so many is to end before the present key."""
        return (
            count >= self._limit or self.size >= PAGE_BYTES_MAX or self._examined >= _EXAMINED_MAX
        )

    def step(self, at: int | None) -> None:
        """Go to the next key; ``at`` is the version of the present one that the iterator is at."""
        self._examined += 1
        self._last = self.key
        behind = self.head[:-1] + AFTER_END
        if at is not None:
            self.iterator.next()
        stored = self.iterator.key() if self.iterator.valid() else None
        if at is None or (stored is not None and stored.startswith(self.head)):
            self.iterator.seek(behind)
        self._read()

    def _read(self) -> None:
        stored = self.iterator.key() if self.iterator.valid() else None
        self.key: str | None = None
        self.head = b""
        self.version = 0
        if stored is None:
            self._engine.check(self.iterator)
        elif stored.startswith(self._begin):
            self.head = stored[:-SUFFIX_BYTES]
            self.version = version_of(stored)
            self.key = self.head[self._skip : -1].decode()


def _seek(
    iterator: Iterator, head: bytes, view: View, upto: int = LAST_VERSION, within: int = 0
) -> int | None:
    """Put the iterator on what a view sees of a key; return the version, or None.

    Args:
        iterator: of the namespace's content.
        head: the key's stored form without a version.
        view: whose.
        upto: look at no newer version than this.
        within: the version of the key that the iterator is at already; 0 when it is elsewhere.
    """
    wanted = view.at_most(min(upto, within or LAST_VERSION))
    if not within or wanted != within:
        iterator.seek(head + inverted(wanted))
    while iterator.valid():
        stored = iterator.key()
        if not stored.startswith(head):
            return None
        version = version_of(stored)
        wanted = view.at_most(version)
        if wanted == version:
            return version
        iterator.seek(head + inverted(wanted))
    return None


def _entry(key: str, version: int, record: Record, now_ms: int) -> Entry:
    value = None if record.is_absent(now_ms) else record.value
    return Entry(key, value, version, record.expires_ms / 1000)
