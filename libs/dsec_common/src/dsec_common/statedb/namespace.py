"""A namespace: the state of one agent or rollout, with versions, snapshots and rollbacks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, cast

from rocksdict import WriteBatch

from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.statedb.changes import Changes, add_changes, too_much
from dsec_common.statedb.compaction import Compacted, Pass
from dsec_common.statedb.engine import Engine
from dsec_common.statedb.hot_keys import HotKeys
from dsec_common.statedb.keys import (
    BATCH_BYTES_MAX,
    BRANCH,
    DATA,
    END,
    KEY_BYTES_MAX,
    LAST_VERSION,
    META,
    SNAPSHOT,
    SUFFIX_BYTES,
    VALUE,
    VALUE_BYTES_MAX,
    encoded_key,
    encoded_namespace,
    packed,
    record_of,
    too_large,
    unpacked,
)
from dsec_common.statedb.lineage import Lineage, View
from dsec_common.statedb.reading import PAGE_KEYS_MAX, DiffPage, Entry, Page, Reader
from dsec_common.statedb.versions import version_at, version_ms, version_required

SNAPSHOTS_MAX: Final = 10_000
_RESERVED: Final = version_at(CLOCK_TOLERANCE_MS)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all namespaces of a StateDB share."""

    engine: Engine
    now_s: Callable[[], float]
    clock_tolerance_ms: int
    hot_keys: HotKeys


class Namespace:
    """Keys and values of one agent or rollout; made by ``StateDB.namespace``.

    Every write has a **version**, greater than all before it, also over restarts and when the clock
    is set back: Unix time in milliseconds times 2^16, counting on within one.
    Reads see the newest version that no rollback undid. A write has survived a crash of
    this process when it returns, and a power cut after ``StateDB.sync``.

    Every call runs at once on the caller's thread, which must be the StateDB's own.

    Every call raises ``DsecError``: ``invalid`` for what can never be kept (nothing is changed),
    ``unavailable`` when RocksDB refuses a write or is closed, ``internal`` when it is damaged.
    """

    __slots__ = (
        "__weakref__",
        "_branch",
        "_ceiling",
        "_data",
        "_engine",
        "_last",
        "_meta",
        "_now_s",
        "_reader",
        "_snapshot",
        "_surroundings",
        "_until_noted",
        "lineage",
        "name",
    )

    def __init__(self, surroundings: Surroundings, name: str) -> None:
        encoded = encoded_namespace(name) + END
        self.name = name
        self._surroundings = surroundings
        self._engine = surroundings.engine
        self._now_s = surroundings.now_s
        self._meta = META + encoded
        self._snapshot = SNAPSHOT + encoded
        self._branch = BRANCH + encoded
        self._data = DATA + encoded
        self._reader = Reader(self._engine, self._data)
        self._until_noted = surroundings.hot_keys.pause()
        ceiling = self._engine.get(self._meta)
        self._last = self._ceiling = unpacked(ceiling) if ceiling else 0
        self.load()

    @property
    def version(self) -> int:
        """The newest version that was given out; 0 before the first.

        After a kill it may be up to 50 ms more, by which no later one is less.
        """
        return self._last

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The snapshots that are held, oldest first."""
        return self.lineage.snapshots

    # What ``put`` and ``get`` do themselves, calls would make a third slower.
    def put(
        self,
        key: str,
        value: bytes,
        *,
        ttl_s: float = 0.0,
        dependencies: Mapping[str, int] | None = None,
    ) -> int:
        """Keep a value and return its version.

        Args:
            key: 1 to 1024 bytes of UTF-8 without NUL.
            value: at most 63 KiB.
            ttl_s: seconds after which the key is absent again; 0 for never.
            dependencies: versions that this one must not be behind, by any name: it is at least
                their greatest plus the clock tolerance. ``conflict`` for one far ahead of the
                clock.
        """
        if ttl_s or dependencies:
            return self.write({key: value}, ttl_s=ttl_s, dependencies=dependencies)
        try:
            encoded = key.encode()
        except UnicodeEncodeError:
            encoded = b""
        if not 0 < len(encoded) <= KEY_BYTES_MAX or b"\0" in encoded:
            encoded_key(key)  # says what is wrong
        if len(value) > VALUE_BYTES_MAX:
            raise too_large(key, value)
        version = int(self._now_s() * 1000) << 16
        if version <= self._last:
            version = self._last + 1
        if version > self._ceiling:
            self.reserve(version)
        self._last = version
        ending = ((LAST_VERSION - version) << 8 | VALUE).to_bytes(1 + SUFFIX_BYTES, "big")
        try:
            self._engine.database[self._data + encoded + ending] = value
        except Exception:  # noqa: BLE001  RocksDB raises bare Exception
            # Once more, with what there is to do about it.
            self._engine.put(self._data + encoded + ending, value)
        self._until_noted -= 1
        if self._until_noted < 0:
            self._note(key, is_write=True)
        return version

    def delete(self, key: str) -> int:
        """Let a key have no value, whether it has one or not; return the version of that."""
        return self.write({}, (key,))

    def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Collection[str] = (),
        *,
        ttl_s: float = 0.0,
        dependencies: Mapping[str, int] | None = None,
    ) -> int:
        """Change several keys, all or none, and return the version that all of them have.

        Args as of :meth:`put`; 64 KiB in all, no key twice.
        """
        changes = Changes(puts, deletes, ttl_s, dependencies)
        return write_together(self._engine, {self: changes})[self]

    def synchronise(self, dependencies: Mapping[str, int]) -> int:
        """Let the next version not be behind the dependencies, and return the present one.

        For an agent that was paused because ``compute.consistency.judge`` found it behind, once it
        has taken over what its dependencies say.
        """
        version = self.next_version(dependencies)
        self.reserve(version)
        self._last = version
        return version

    def get(self, key: str, *, at: int | None = None) -> bytes | None:  # noqa: C901
        """Return a key's value; None when it has none, or has expired.

        Args:
            key: as of :meth:`put`.
            at: a held snapshot; by default the present. ``not_found`` for one that is not held.
        """
        self._until_noted -= 1
        if self._until_noted < 0:
            self._note(key, is_write=False)
        if at is not None:
            entry = self._reader.entry(key, self._view(at), self._now_ms())
            return entry.value if entry else None
        try:
            encoded = key.encode()
        except UnicodeEncodeError:
            encoded = b""
        if not 0 < len(encoded) <= KEY_BYTES_MAX or b"\0" in encoded:
            encoded_key(key)  # says what is wrong
        head = self._data + encoded + END
        engine = self._engine
        try:
            engine.cursor.seek(head)
            stored = engine.cursor.key()
            if stored is None:
                engine.check()
                return None
            if not stored.startswith(head):
                return None
            starts, ends = self.lineage.now
            if len(starts) > 1:
                version = LAST_VERSION - int.from_bytes(stored[-SUFFIX_BYTES:-1], "big")
                if version > ends[bisect_left(starts, version) - 1]:
                    entry = self._reader.entry(key, self.lineage.now, self._now_ms())
                    return entry.value if entry else None
            value = cast("bytes", engine.cursor.value())
        except DsecError:
            raise
        except Exception as error:  # noqa: BLE001  RocksDB raises bare Exception
            engine.raise_unreadable(error)
        if stored[-1] == VALUE:
            return value
        record = record_of(stored, value)
        return None if record.is_absent(self._now_ms()) else record.value

    def entry(self, key: str, *, at: int | None = None) -> Entry | None:
        """Return a key with its version and expiry, a deleted one too; None when it never was.

        ``at`` as of :meth:`get`.
        """
        return self._reader.entry(key, self._view(at), self._now_ms())

    def history(self, key: str, *, limit: int = 100) -> tuple[Entry, ...]:
        """Return a key's versions, the newest first, without those that a rollback undid.

        Those that no snapshot sees are gone after a compaction.
        """
        if not 1 <= limit <= PAGE_KEYS_MAX:
            raise invalid(f"a history has 1 to {PAGE_KEYS_MAX} versions, not {limit}")
        return self._reader.history(key, self.lineage.now, limit, self._now_ms())

    def scan(
        self,
        prefix: str = "",
        *,
        at: int | None = None,
        after: str | None = None,
        limit: int = PAGE_KEYS_MAX,
    ) -> Page:
        """Return a page of the keys that have a value, in order of their code points.

        Args:
            prefix: what the keys begin with.
            at: as of :meth:`get`; several pages are of one moment only with it.
            after: of the page before.
            limit: keys in the page, at most 1000; it also ends after 256 KiB.
        """
        return self._reader.scan(prefix, self._view(at), after, limit, self._now_ms())

    def diff(
        self,
        before: int,
        now: int | None = None,
        *,
        after: str | None = None,
        limit: int = PAGE_KEYS_MAX,
    ) -> DiffPage:
        """Return a page of what a snapshot and another, or the present, do not agree on.

        It looks at every key of the namespace, and reads those that were written in between.
        ``after`` and ``limit`` as of :meth:`scan`.
        """
        views = self._view(before), self._view(now)
        return self._reader.diff(*views, after, limit, self._now_ms())

    def snapshot(self) -> int:
        """Hold the present state and return its number, whatever the size of the state.

        It can be read and gone back to until it is released. It is a version: greater than those
        of all before it, less than those of all after it. ``exhausted`` when 10,000 are held.
        """
        if self.lineage.snapshot_count >= SNAPSHOTS_MAX:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"{SNAPSHOTS_MAX} snapshots of {self.name!r} are held; release some",
                retryable=False,
            )
        version = self.next_version()
        self.reserve(version)
        self._last = version

        def build() -> WriteBatch:
            batch = WriteBatch(raw_mode=True)
            batch.put(self._snapshot + packed(version), b"")
            return batch

        if self._commit(build):
            self.lineage.hold(version)
        return version

    def release(self, snapshot: int) -> None:
        """Let a snapshot go; what only it could see goes with the next compaction.

        ``not_found`` when it is not held.
        """
        self._must_hold(snapshot)
        if snapshot == 0:
            raise invalid("0, the state before everything, is not held and cannot be released")
        ended = self.lineage.releasing(snapshot)

        def build() -> WriteBatch:
            batch = WriteBatch(raw_mode=True)
            batch.delete(self._snapshot + packed(snapshot))
            for start in ended:
                batch.delete(self._branch + packed(start))
            return batch

        if self._commit(build):
            self.lineage.release(snapshot)

    def rollback(self, snapshot: int) -> int:
        """Go back to a held snapshot and return the version of that, whatever the size.

        Everything written after the snapshot is undone. Other snapshots stay held, newer ones too,
        and can be gone back to. 0 is the state before everything.
        """
        self._must_hold(snapshot)
        version = self.next_version()
        rollback = self.lineage.rolling_back(snapshot, version)
        self.reserve(version)
        self._last = version

        def build() -> WriteBatch:
            batch = WriteBatch(raw_mode=True)
            batch.put(self._branch + packed(rollback.start), packed(rollback.base))
            for start in rollback.dropped:
                batch.delete(self._branch + packed(start))
            return batch

        if self._commit(build):
            self.lineage.roll_back(rollback)
        return rollback.start

    def clear(self) -> int:
        """Release all snapshots and go back to the empty state; return the version of that.

        What it took on the disk goes with the next compaction.
        """
        for snapshot in self.snapshots:
            self.release(snapshot)
        return self.rollback(0)

    async def compact(self) -> Compacted:
        """Remove from the disk what nobody can see; one pass at a time. See ``StateDB.compact``."""
        edges = self.lineage.edges(self._last)
        compacted = await Pass(self._engine, self._data, edges, self._now_ms()).run()
        folded = self.lineage.folding(edges.foldable)
        is_gone = (
            not compacted.kept
            and self._last == edges.until
            and not self.lineage.snapshot_count
            and version_ms(self._last) < self._now_ms()
        )

        def build() -> WriteBatch:
            batch = WriteBatch(raw_mode=True)
            for start in folded:
                batch.delete(self._branch + packed(start))
            if is_gone:
                batch.delete(self._meta)
            return batch

        if (folded or is_gone) and self._commit(build):
            self.lineage.fold(folded)
        if is_gone:
            self._ceiling = 0
        return compacted

    def load(self) -> None:
        """Read branches and snapshots from the disk."""
        skip = len(self._snapshot)
        bases = {unpacked(key[skip:]): unpacked(base) for key, base in self._all(self._branch)}
        self.lineage = Lineage(
            bases, [unpacked(key[skip:]) for key, _ in self._all(self._snapshot)]
        )

    def next_version(self, dependencies: Mapping[str, int] | None = None) -> int:
        """Return the version that a write would have now."""
        now_ms = self._now_ms()
        version = max(version_at(now_ms), self._last + 1)
        if dependencies:
            tolerance_ms = self._surroundings.clock_tolerance_ms
            version = max(version, version_required(dependencies, tolerance_ms, now_ms))
        return version

    def reserve(self, version: int) -> None:
        """See that a restart goes on above this version, whatever the clock says then."""
        if version > self._ceiling:
            ceiling = version + _RESERVED
            self._engine.put(self._meta, packed(ceiling))
            self._ceiling = ceiling

    def settle(self) -> None:
        """Let a restart go on right above the last version."""
        if self._ceiling > self._last:
            self._engine.put(self._meta, packed(self._last))
            self._ceiling = self._last

    def add(self, batch: WriteBatch, changes: Changes, version: int) -> int:
        """Add changes of this namespace to a batch, and return their bytes."""
        return add_changes(batch, changes, self._data, version, self._now_s())

    def note_writes(self, changes: Changes) -> None:
        """Count a sample of the keys that were written."""
        self._until_noted -= len(changes.puts) + len(changes.deletes)
        if self._until_noted < 0:
            names = (*changes.puts, *changes.deletes)
            while self._until_noted < 0:
                key = names[self._until_noted]
                self._surroundings.hot_keys.note(self.name, key, is_write=True)
                self._until_noted += self._surroundings.hot_keys.pause() + 1

    def gave(self, version: int) -> None:
        """Take a version as given out."""
        self._last = version

    def _commit(self, build: Callable[[], WriteBatch]) -> bool:
        """Write; return False when branches and snapshots were read again and are as written."""
        openings = self._engine.openings
        self._engine.write(build)
        if self._engine.openings == openings:
            return True
        self.load()
        return False

    def _all(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        iterator = self._engine.iterate()
        iterator.seek(prefix)
        found = []
        while iterator.valid() and iterator.key().startswith(prefix):
            found.append((iterator.key(), iterator.value()))
            iterator.next()
        self._engine.check(iterator)
        return found

    def _view(self, at: int | None) -> View:
        if at is None:
            return self.lineage.now
        self._must_hold(at)
        return self.lineage.at(at)

    def _must_hold(self, snapshot: int) -> None:
        if not self.lineage.holds(snapshot):
            raise not_found(
                f"{self.name!r} holds no snapshot {snapshot}",
                namespace=self.name,
                snapshot=snapshot,
            )

    def _note(self, key: str, *, is_write: bool) -> None:
        self._surroundings.hot_keys.note(self.name, key, is_write=is_write)
        self._until_noted = self._surroundings.hot_keys.pause()

    def _now_ms(self) -> int:
        return int(self._now_s() * 1000)


def write_together(engine: Engine, changes: Mapping[Namespace, Changes]) -> dict[Namespace, int]:
    """Change several namespaces, all or none; return the version in each."""
    versions = {it: it.next_version(change.dependencies) for it, change in changes.items()}

    def build() -> WriteBatch:
        batch = WriteBatch(raw_mode=True)
        size = 0
        for namespace, change in changes.items():
            size += namespace.add(batch, change, versions[namespace])
        if size > BATCH_BYTES_MAX:
            raise too_much()
        if not len(batch):
            raise invalid("there is nothing to write")
        for namespace, version in versions.items():
            namespace.reserve(version)
            namespace.gave(version)
        return batch

    engine.write(build)
    for namespace, change in changes.items():
        namespace.note_writes(change)
    return versions
