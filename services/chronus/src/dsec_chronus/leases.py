"""Who owns which shard: leases in a bucket, and a fair share for each process.

A lease is an entry that NATS drops when it is not renewed. Its holder counts from before it asked
for the renewal and stops a little early, so that two processes never both think they own a shard;
the journal's fence holds even where a clock stood still.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from dsec_common.bus import Entry, KeyValue
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message

log = structlog.get_logger()

BUCKET: Final = "chronus-shards"

_SHARD: Final = "shard."
_PROCESS: Final = "process."
_SAFE_SHARE: Final = 0.9
"""How much of a lease's life its holder relies on."""


class Lease(Message, frozen=True, kw_only=True):
    """An entry of the bucket: a process lives, or owns a shard."""

    process: str


class Plan(NamedTuple):
    """What a process should do for every process to have its share."""

    take: tuple[str, ...]
    give: tuple[str, ...]


def plan(process: str, processes: Iterable[str], owners: Mapping[str, str]) -> Plan:
    """Return which free shards to take and which to give up.

    No process owns more than its share, rounded up, and each takes what is free up to it.

    Args:
        process: who asks.
        processes: all that live; ``process`` counts even when it is not among them.
        owners: every shard's owner, empty when it is free.
    """
    share = math.ceil(len(owners) / len({process, *processes}))
    mine = [shard for shard, owner in owners.items() if owner == process]
    free = [shard for shard, owner in owners.items() if not owner]
    return Plan(tuple(free[: max(0, share - len(mine))]), tuple(mine[share:]))


@dataclass(slots=True)
class Held:
    """A lease that is ours until ``until_s`` of the monotonic clock."""

    shard: str
    revision: int
    until_s: float


class Leases:
    """The bucket as one process sees it.

    Args:
        bucket: entries live for ``ttl_s``.
        process: this process's id.
        ttl_s: a lease's life.
        clock: counts it.
    """

    def __init__(self, bucket: KeyValue[Lease], process: str, ttl_s: float, clock: Clock) -> None:
        self._bucket = bucket
        self._process = process
        self._ttl_s = ttl_s
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}

    def saw(self, entry: Entry[Lease]) -> bool:
        """Take in what the bucket's watch tells; return whether it calls for a new plan."""
        known = entry.key in self._seen
        if entry.value is None:
            self._seen.pop(entry.key, None)
            return known
        self._seen[entry.key] = (entry.value.process, self._clock.monotonic())
        return not known and entry.key.startswith(_PROCESS)

    def _alive(self, prefix: str) -> dict[str, str]:
        # The watch may miss the end of an entry across a lost connection, never its renewals.
        oldest_s = self._clock.monotonic() - 2 * self._ttl_s
        return {
            key.removeprefix(prefix): process
            for key, (process, seen_s) in self._seen.items()
            if key.startswith(prefix) and seen_s > oldest_s
        }

    def plan(self, shards: Iterable[str], mine: Iterable[str]) -> Plan:
        """Return what to take and give up, by what has been seen and what is held."""
        owners = self._alive(_SHARD)
        held = set(mine)
        return plan(
            self._process,
            self._alive(_PROCESS),
            {
                shard: self._process if shard in held else self._other(owners.get(shard, ""))
                for shard in shards
            },
        )

    def _other(self, owner: str) -> str:
        # A lease of ours that is not held was given up a moment ago.
        return "" if owner == self._process else owner

    async def announce(self) -> None:
        """Tell the others that this process lives and wants its share."""
        await self._bucket.put(_PROCESS + self._process, Lease(process=self._process))

    async def withdraw(self) -> None:
        """Tell the others that this process wants nothing any more."""
        await self._bucket.delete(_PROCESS + self._process)

    async def take(self, shard: str) -> Held | None:
        """Return the lease on a free shard, or None when another was faster.

        Raises:
            DsecError: ``unavailable`` or ``timeout``.
        """
        asked_at = self._clock.monotonic()
        try:
            revision = await self._bucket.create(_SHARD + shard, Lease(process=self._process))
        except DsecError as error:
            if error.code is ErrorCode.CONFLICT:
                return None
            raise
        return Held(shard, revision, asked_at + self._ttl_s * _SAFE_SHARE)

    async def renew(self, held: Held) -> None:
        """Prolong a lease; without an answer it runs out when its time comes.

        Raises:
            DsecError: ``conflict`` when it is another's.
        """
        asked_at = self._clock.monotonic()
        try:
            held.revision = await self._bucket.update(
                _SHARD + held.shard, Lease(process=self._process), held.revision
            )
        except DsecError as error:
            if error.code is ErrorCode.CONFLICT and not await self._is_ours(held):
                raise
            log.warning("a lease was not renewed", shard=held.shard, error=error.message)
            return
        held.until_s = asked_at + self._ttl_s * _SAFE_SHARE

    async def _is_ours(self, held: Held) -> bool:
        """Return whether an earlier renewal took effect whose acknowledgement got lost."""
        try:
            entry = await self._bucket.get(_SHARD + held.shard)
        except DsecError:
            return False
        if entry.value is None or entry.value.process != self._process:
            return False
        held.revision = entry.revision
        return True

    async def give(self, held: Held) -> None:
        """Free a shard for others; one that is another's already stays so.

        Raises:
            DsecError: ``unavailable`` or ``timeout``; the lease then runs out by itself.
        """
        while True:
            try:
                await self._bucket.delete(_SHARD + held.shard, revision=held.revision)
            except DsecError as error:
                if error.code is not ErrorCode.CONFLICT:
                    raise
                # A renewal may have been on its way.
                if await self._is_ours(held):
                    continue
            return
