"""Compaction of dead versions: what nobody can see any more leaves the disk.

A pass goes through a namespace in steps of a millisecond or so, each of them one write, between
which the loop is free. It keeps of each key the newest version on each edge (see ``lineage``) up to
the version at which it began, and everything newer. Dying in between loses nothing: the next pass
finds the rest.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from rocksdict import CompactOptions, Rdict, WriteBatch

from dsec_common.statedb.engine import Engine
from dsec_common.statedb.keys import (
    AFTER_END,
    SUFFIX_BYTES,
    record_of,
    version_of,
)
from dsec_common.statedb.lineage import Edges

_STEP: Final = 256


class Compacted(NamedTuple):
    """What a pass found: how many stored versions it kept and removed."""

    kept: int
    removed: int


class Pass:
    """One pass over the data of a namespace.

    Args:
        engine: whose data.
        data: what all keys of the namespace begin with.
        edges: what could be told apart when the pass began.
        now_ms: values that expired before are as good as deleted.
    """

    def __init__(self, engine: Engine, data: bytes, edges: Edges, now_ms: int) -> None:
        self._engine = engine
        self._data = data
        self._edges = edges
        self._now_ms = now_ms
        self._next = data
        self._head = b""
        self._seen: set[int] = set()
        self._trailing: list[bytes] = []
        self.kept = 0
        self.removed = 0

    async def run(self) -> Compacted:
        """Go through all of it, and let RocksDB free the space.

        Raises:
            DsecError: ``unavailable`` when RocksDB refuses a write.
        """
        while self._step():  # noqa: ASYNC110  it works, and lets the loop work
            await asyncio.sleep(0)
        if self.removed:
            await self._engine.job(self._free)
            self._engine.freshen()
        return Compacted(self.kept, self.removed)

    def _step(self) -> bool:
        """Look at some versions, and remove the dead; return whether others follow."""
        dead: list[bytes] = []
        goes_on = self._look(dead)
        # Without an iterator, not even in the traceback of a refusal: one keeps the database
        # locked, which has to be opened again then.
        self._remove(dead)
        return goes_on

    def _look(self, dead: list[bytes]) -> bool:
        """Add those that are dead among the next versions; return whether others follow."""
        iterator = self._engine.iterate()
        iterator.seek(self._next)
        for _ in range(_STEP):
            stored = iterator.key() if iterator.valid() else None
            if stored is None or not stored.startswith(self._data):
                self._engine.check(iterator)
                self._end_key(dead)
                return False
            if not stored.startswith(self._head) or not self._head:
                self._end_key(dead)
                self._head = stored[:-SUFFIX_BYTES]
            self._judge(stored, iterator.value(), dead)
            self._next = stored + b"\0"
            iterator.next()
        return True

    def _judge(self, stored: bytes, value: bytes, dead: list[bytes]) -> None:
        version = version_of(stored)
        if version > self._edges.until:
            self.kept += 1
            return
        edge = self._edges.edge_of(version)
        if edge is None or edge in self._seen:
            dead.append(stored)
            return
        self._seen.add(edge)
        self.kept += 1
        if record_of(stored, value).is_absent(self._now_ms):
            self._trailing.append(stored)
        else:
            self._trailing.clear()

    def _end_key(self, dead: list[bytes]) -> None:
        """Drop the oldest versions of a key when all they say is that it has no value."""
        self.kept -= len(self._trailing)
        dead += self._trailing
        self._trailing.clear()
        self._seen.clear()

    def _remove(self, dead: list[bytes]) -> None:
        if not dead:
            return

        def build() -> WriteBatch:
            batch = WriteBatch(raw_mode=True)
            for stored in dead:
                batch.delete(stored)
            return batch

        self._engine.write(build)
        self.removed += len(dead)

    def _free(self, database: Rdict) -> None:
        options = CompactOptions()
        options.set_exclusive_manual_compaction(False)
        database.compact_range(self._data, self._data[:-1] + AFTER_END, options)
