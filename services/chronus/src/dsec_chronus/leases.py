"""Who owns which shard: one lease for each process, and a fair share for each.

A process's lease is an entry that NATS drops when it is not renewed; what the process owns, it owns
by that lease, so that its silence frees all of it and being there costs the same with one shard or
a thousand. The holder counts from before it asked for the renewal and stops a little early, so that
two processes never both think they own a shard; the journal's fence holds even where a clock stood
still.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from dsec_common.bus import Entry, KeyValue
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message

BUCKET: Final = "chronus-owners"

_SHARD: Final = "shard."
_PROCESS: Final = "process."
_SAFE_SHARE: Final = 0.9
"""How much of a lease's life its holder relies on."""


class Lease(Message, frozen=True, kw_only=True):
    """An entry of the bucket: a process lives, or owns a shard.

    Attributes:
        process: its id.
        leaving: it hands over what it owns and wants no share any more.
    """

    process: str
    leaving: bool = False


class Plan(NamedTuple):
    """What a process should do for every process to have its share."""

    take: tuple[str, ...]
    give: tuple[str, ...]


def plan(process: str, processes: Iterable[str], owners: Mapping[str, str]) -> Plan:
    """Return which free shards to take and which to give up.

    No process owns more than its share, rounded up, and each takes what is free up to it.

    Args:
        process: who asks.
        processes: all that want a share; ``process`` counts even when it is not among them.
        owners: every shard's owner, empty when it is free.
    """
    share = math.ceil(len(owners) / len({process, *processes}))
    mine = [shard for shard, owner in owners.items() if owner == process]
    free = [shard for shard, owner in owners.items() if not owner]
    return Plan(tuple(free[: max(0, share - len(mine))]), tuple(mine[share:]))


@dataclass(frozen=True, slots=True)
class Held:
    """A shard that is ours as long as our lease runs and its entry has this revision."""

    shard: str
    revision: int


class _Seen(NamedTuple):
    lease: Lease
    revision: int
    at_s: float


class Leases:
    """The bucket as one process sees it.

    Args:
        bucket: processes' entries have a life of their own in it, shards' stay.
        process: this process's id.
        ttl_s: a lease's life.
        clock: counts it.
    """

    def __init__(self, bucket: KeyValue[Lease], process: str, ttl_s: float, clock: Clock) -> None:
        self._bucket = bucket
        self._process = process
        self._ttl_s = ttl_s
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._until_s = -math.inf

    # --- Our own lease ------------------------------------------------------------------------

    @property
    def in_force(self) -> bool:
        """Whether our lease runs, and so whatever we own is ours."""
        return self._clock.monotonic() < self._until_s

    async def renew(self, *, leaving: bool = False) -> bool:
        """Prolong our lease, which tells the others that we live and whether we want our share.

        Returns:
            Whether it ran all the time: after a gap, what we own may be another's.

        Raises:
            DsecError: ``unavailable`` or ``timeout``; it then runs out when its time comes.
        """
        asked_at = self._clock.monotonic()
        await self._bucket.put(
            _PROCESS + self._process,
            Lease(process=self._process, leaving=leaving),
            ttl_s=math.ceil(self._ttl_s),  # NATS counts whole seconds
        )
        without_gap = self.in_force
        self._until_s = asked_at + self._ttl_s * _SAFE_SHARE
        return without_gap

    async def end(self) -> None:
        """Free all that we own, and tell the others that this process is gone."""
        self._until_s = -math.inf
        await self._bucket.delete(_PROCESS + self._process)

    # --- What is known ------------------------------------------------------------------------

    def saw(self, entry: Entry[Lease]) -> bool:
        """Take in what the bucket's watch tells; return whether it calls for a new plan."""
        known = self._seen.get(entry.key)
        if entry.value is None:
            self._seen.pop(entry.key, None)
            return known is not None
        self._seen[entry.key] = _Seen(entry.value, entry.revision, self._clock.monotonic())
        is_news = known is None or known.lease.leaving != entry.value.leaving
        return is_news and entry.key.startswith(_PROCESS)

    def is_lost(self, held: Held) -> bool:
        """Return whether another process was seen to have taken a shard from us."""
        seen = self._seen.get(_SHARD + held.shard)
        return (
            seen is not None
            and seen.revision > held.revision
            and seen.lease.process != self._process
        )

    def _living(self) -> dict[str, Lease]:
        # The watch may miss the end of an entry across a lost connection, never its renewals.
        oldest_s = self._clock.monotonic() - 2 * self._ttl_s
        return {
            seen.lease.process: seen.lease
            for key, seen in self._seen.items()
            if key.startswith(_PROCESS) and seen.at_s > oldest_s
        }

    def plan(self, shards: Iterable[str], mine: Iterable[str]) -> Plan:
        """Return what to take and give up, by what has been seen and what is held."""
        living, held = self._living(), set(mine)
        wanting = [process for process, lease in living.items() if not lease.leaving]
        owners = {shard: self._owner(shard, living, held) for shard in shards}
        return plan(self._process, wanting, owners)

    def _owner(self, shard: str, living: Mapping[str, Lease], held: set[str]) -> str:
        if shard in held:
            return self._process
        seen = self._seen.get(_SHARD + shard)
        owner = "" if seen is None else seen.lease.process
        # What is ours by the bucket but not held was given up a moment ago.
        return owner if owner in living and owner != self._process else ""

    # --- Shards -------------------------------------------------------------------------------

    async def take(self, shard: str) -> Held | None:
        """Take a free shard; return None when our lease does not run or another was faster.

        Raises:
            DsecError: ``unavailable`` or ``timeout``.
        """
        seen = self._seen.get(_SHARD + shard)
        if not self.in_force or (seen is not None and await self._lives(seen.lease.process)):
            return None
        key, lease = _SHARD + shard, Lease(process=self._process)
        try:
            if seen is None:
                return Held(shard, await self._bucket.create(key, lease))
            return Held(shard, await self._bucket.update(key, lease, seen.revision))
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
        await self._read(key)
        return None

    async def holds(self, held: Held) -> bool:
        """Ask the bucket itself whether a shard is still ours.

        Raises:
            DsecError: ``unavailable`` or ``timeout``.
        """
        entry = await self._read(_SHARD + held.shard)
        return entry is not None and entry.revision == held.revision

    async def _read(self, key: str) -> Entry[Lease] | None:
        """Read and remember one entry: the watch may be behind, or have missed its end."""
        try:
            entry = await self._bucket.get(key)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            self._seen.pop(key, None)
            return None
        self.saw(entry)
        return entry

    async def _lives(self, process: str) -> bool:
        return process != self._process and await self._read(_PROCESS + process) is not None

    async def give(self, held: Held) -> None:
        """Free a shard for others; one that is another's already stays so.

        Raises:
            DsecError: ``unavailable`` or ``timeout``; it is then free when our lease ends.
        """
        try:
            await self._bucket.delete(_SHARD + held.shard, revision=held.revision)
        except DsecError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
