"""The StateDB: versioned state of agents and rollouts in one RocksDB."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from weakref import WeakValueDictionary

from rocksdict import Rdict

from dsec_common.clock import Clock, SystemClock
from dsec_common.compute.consistency import CLOCK_TOLERANCE_MS
from dsec_common.errors import from_os_error, invalid
from dsec_common.statedb import checkpoints
from dsec_common.statedb.changes import Changes
from dsec_common.statedb.compaction import Compacted
from dsec_common.statedb.engine import Engine
from dsec_common.statedb.hot_keys import HotKey, HotKeys
from dsec_common.statedb.keys import (
    AFTER_END,
    DATA,
    FORMAT,
    HEADER,
    META,
    encoded_namespace,
    packed_format,
    record_of,
    unpacked,
)
from dsec_common.statedb.memory import usable_memory_bytes, write_buffer_bytes
from dsec_common.statedb.namespace import Namespace, Surroundings, write_together

_KEPT_AT_HAND: Final = 4096
_STEP: Final = 256


class StateDB:
    """Namespaces of versioned state in a directory that one process has open.

    What is written has survived a crash of this process when the call returns, and a power cut once
    :meth:`sync` has returned. After a power cut without it the newest writes may be missing, always
    from the end, and no write is there in part. Content has checksums: what was damaged is an
    error, never another value.

    It belongs to one thread, that of its event loop: reads and writes run at once (they are short
    and hold Python's lock), the rest is awaited.

    Args:
        directory: of this database alone; made when missing.
        clock: whose time versions and expiry follow.
        memory_bytes: what this process may use at all; by default what the machine and the cgroups
            say. The write buffers get 15 % of it, from 8 to 512 MiB, and as much again but at
            most 256 MiB is a cache of what is read.
        clock_tolerance_ms: how far the clocks of an agent and of what it depends on may be apart.
        count_one_of: one of so many operations is counted for :meth:`hot_keys`.

    Raises:
        DsecError: ``unavailable`` when it is open already; ``unsupported`` when a newer version
            wrote it; ``invalid`` when something else is in the directory; ``internal`` when it is
            damaged.
    """

    def __init__(
        self,
        directory: Path,
        *,
        clock: Clock | None = None,
        memory_bytes: int | None = None,
        clock_tolerance_ms: int = CLOCK_TOLERANCE_MS,
        count_one_of: int = 64,
    ) -> None:
        if count_one_of < 1 or clock_tolerance_ms < 0:
            raise invalid("a StateDB counts one of 1 or more, and tolerates 0 ms or more")
        clock = clock or SystemClock()
        try:
            if not directory.exists():
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                checkpoints.sync(directory.parent)
        except OSError as error:
            raise from_os_error("making a StateDB", error, str(directory)) from error
        memory_bytes = usable_memory_bytes() if memory_bytes is None else memory_bytes
        self._living: WeakValueDictionary[str, Namespace] = WeakValueDictionary()
        self._at_hand: OrderedDict[str, Namespace] = OrderedDict()
        self._compacting = asyncio.Lock()
        self._clock = clock
        self._engine = Engine(directory, write_buffer_bytes(memory_bytes), self._load_again)
        self._hot_keys = HotKeys(clock.monotonic, count_one_of)
        # The same without a call in between, of which every write makes one.
        now_s = time.time if isinstance(clock, SystemClock) else clock.now
        self._surroundings = Surroundings(self._engine, now_s, clock_tolerance_ms, self._hot_keys)
        try:
            self._check_header()
        except BaseException:
            self._engine.close_now()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self._engine.directory

    def namespace(self, name: str) -> Namespace:
        """Return a namespace, which is there as soon as something is written to it.

        Args:
            name: 1 to 255 bytes of UTF-8 without NUL.
        """
        found = self._living.get(name)
        if found is None:
            found = self._living[name] = Namespace(self._surroundings, name)
        self._at_hand[name] = found
        self._at_hand.move_to_end(name)
        if len(self._at_hand) > _KEPT_AT_HAND:
            _, eldest = self._at_hand.popitem(last=False)
            eldest.settle()
        return found

    def namespaces(self, *, after: str | None = None, limit: int = 1000) -> tuple[str, ...]:
        """Return names of namespaces in order; the next page is after the last of them."""
        if limit < 1:
            raise invalid(f"a page has at least one name, not {limit}")
        iterator = self._engine.iterate()
        iterator.seek(META if after is None else META + encoded_namespace(after) + AFTER_END)
        names: list[str] = []
        while len(names) < limit and iterator.valid() and iterator.key().startswith(META):
            names.append(iterator.key()[len(META) : -1].decode())
            iterator.next()
        self._engine.check(iterator)
        return tuple(names)

    def write(self, changes: Mapping[str, Changes]) -> dict[str, int]:
        """Change several namespaces, all or none, and return the version in each; 64 KiB in all.

        Raises:
            DsecError: as ``Namespace.write``.
        """
        found = {self.namespace(name): change for name, change in changes.items()}
        return {it.name: version for it, version in write_together(self._engine, found).items()}

    def hot_keys(self, limit: int = 20) -> tuple[HotKey, ...]:
        """Return the keys with the most operations of the last one or two minutes.

        Rates are estimates from a sample; scans are not counted.
        """
        return self._hot_keys.report(limit)

    async def sync(self) -> None:
        """Return when all that was written before is on the disk.

        Raises:
            DsecError: ``unavailable`` when the disk refuses.
        """
        await self._engine.job(lambda database: database.flush_wal(True))

    async def compact(self, name: str | None = None) -> Compacted:
        """Remove versions that nobody can see, of one namespace or of all, and free their space.

        Those are values that were put again, deleted, expired or undone, unless a held snapshot
        sees them. It works in steps of about a millisecond between which the loop is free. Call it
        now and then: reads find their way around what is dead, which takes longer the more of it
        lies there. A namespace without content is forgotten.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses a write.
        """
        async with self._compacting:
            if name is not None:
                return await self.namespace(name).compact()
            kept = removed = 0
            names = self.namespaces()
            while names:
                for each in names:
                    compacted = await self.namespace(each).compact()
                    kept += compacted.kept
                    removed += compacted.removed
                names = self.namespaces(after=names[-1])
            return Compacted(kept, removed)

    async def verify(self) -> int:
        """Read everything, and return how many versions there are.

        Raises:
            DsecError: ``internal`` at the first that is damaged.
        """
        begin, count = b"", 0
        while True:
            iterator = self._engine.iterate()
            iterator.seek(begin)
            for _ in range(_STEP):
                if not iterator.valid():
                    self._engine.check(iterator)
                    return count
                key = iterator.key()
                if key.startswith(DATA):
                    record_of(key, iterator.value())
                    count += 1
                begin = key + b"\0"
                iterator.next()
            del iterator  # it would keep the database locked
            await asyncio.sleep(0)

    async def checkpoint(self, target: Path) -> None:
        """Make a whole copy of this moment in a new directory, for ``restore``.

        Raises:
            DsecError: ``conflict`` when the target exists; ``unavailable`` when RocksDB refuses.
        """

        def take(database: Rdict) -> None:
            checkpoints.take(database, target)

        await self._engine.job(take)

    async def close(self) -> None:
        """Put everything on the disk and let go of the directory; later calls are refused."""
        if self._engine.is_closed:
            return
        try:
            for namespace in list(self._living.values()):
                namespace.settle()
            await self.sync()
        finally:
            await self._engine.close()

    def _load_again(self) -> None:
        for namespace in list(self._living.values()):
            namespace.load()

    def _check_header(self) -> None:
        header = self._engine.get(HEADER)
        if header is not None:
            checkpoints.check_format(unpacked(header), self.directory)
            return
        iterator = self._engine.iterate()
        iterator.seek_to_first()
        self._engine.check(iterator)
        is_empty = not iterator.valid()
        iterator.drop()
        if not is_empty:
            raise invalid(f"there is something else than a StateDB in {self.directory}")
        self._engine.put(HEADER, packed_format(FORMAT))
