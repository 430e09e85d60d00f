"""The registry's documents in JetStream: read, followed, and changed by compare-and-swap."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog

from dsec_common.bus import Bus, Entry, KeyValue
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.retry import until_available
from dsec_common.wire.agent import CONTRACT_MAX_BYTES
from dsec_common.wire.base import Message
from dsec_scheduler.agents import changes
from dsec_scheduler.agents.records import AgentRecord, ContractRecord, ShardRecord
from dsec_scheduler.agents.shards import Known
from dsec_scheduler.swapping import NOTHING, swap

_log: Final = structlog.get_logger(__name__)

AGENTS_BUCKET: Final = "dsec-agents"
INSTANCES_BUCKET: Final = "dsec-agent-instances"

_FIRST_PAUSE_S: Final = 0.002
_LAST_PAUSE_S: Final = 0.1
_READ_ANEW_S: Final = 300.0
_RETRY_S: Final = 2.0
DocumentT = TypeVar("DocumentT", bound=Message)

ShardChange = Callable[[ShardRecord], ShardRecord | None]


class WrittenContract(NamedTuple):
    """A contract as it is kept, and its hash; an empty one has none."""

    sha256: str
    body: bytes


def written(contract: Mapping[str, Any]) -> WrittenContract:
    """Return a contract as it is kept.

    Raises:
        DsecError: ``invalid`` when it is too large.
    """
    if not contract:
        return WrittenContract("", b"")
    body = msgspec.json.encode(contract, order="deterministic")
    if len(body) > CONTRACT_MAX_BYTES:
        raise invalid(
            f"the contract has {len(body)} bytes: at most {CONTRACT_MAX_BYTES} are taken",
            field="contract",
        )
    return WrittenContract(hashlib.sha256(body).hexdigest(), body)


class Registry:
    """All agents of all projects, and their instances.

    Agents are few and followed, so that a creation finds its own without asking; instances are
    many, and read when somebody wants to know.
    """

    def __init__(
        self,
        agents: KeyValue[AgentRecord],
        contracts: KeyValue[ContractRecord],
        documents: KeyValue[ShardRecord],
        clock: Clock,
        randomness: random.Random,
    ) -> None:
        self._agents = agents
        self._contracts = contracts
        self._shards = documents
        self._clock = clock
        self._random = randomness
        self._known: dict[str, AgentRecord] = {}
        self._reading: asyncio.Task[Known] | None = None
        self._waiting: dict[str, list[tuple[ShardChange, asyncio.Future[None]]]] = {}
        self._writers: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def open(
        cls, bus: Bus, clock: Clock, replicas: int, randomness: random.Random
    ) -> Registry:
        """Return the registry once its buckets are there."""

        async def bucket(name: str, kind: type[Any]) -> Any:
            return await until_available(
                f"the bucket {name}",
                functools.partial(bus.kv, name, kind, replicas=replicas),
                clock,
            )

        return cls(
            await bucket(AGENTS_BUCKET, AgentRecord),
            await bucket(AGENTS_BUCKET, ContractRecord),
            await bucket(INSTANCES_BUCKET, ShardRecord),
            clock,
            randomness,
        )

    # --- Agents -------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep up with what any scheduler writes, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_READ_ANEW_S):
                    await self._follow_once()
            except TimeoutError:
                continue
            except DsecError as error:
                _log.info("agents_not_read", error=str(error))
                await self._clock.sleep(_RETRY_S)

    async def _follow_once(self) -> None:
        async with contextlib.aclosing(self._agents.watch("*.*")) as entries:
            async for entry in entries:
                if entry is not None and entry.value is not None:
                    self._learn(entry.key, entry.value)

    def _learn(self, key: str, record: AgentRecord) -> None:
        known = self._known.get(key)
        if known is None or known.revision <= record.revision:
            self._known[key] = record

    def known(self, project: str, name: str) -> AgentRecord | None:
        """Return an agent as last heard, without asking; None when nothing was heard of one."""
        record = self._known.get(f"{project}.{name}")
        return record if record is not None and record.versions else None

    async def read(self, project: str, name: str) -> AgentRecord:
        """Return an agent as it is now.

        Raises:
            DsecError: ``not_found``.
        """
        try:
            entry = await self._agents.get(f"{project}.{name}")
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            raise changes.no_agent(name) from None
        record = _present(entry)
        self._learn(entry.key, record)
        if not record.versions:
            raise changes.no_agent(name)
        return record

    async def find(self, project: str, name: str) -> AgentRecord | None:
        """Return an agent as it is now, or None."""
        try:
            return await self.read(project, name)
        except DsecError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return None

    async def of_project(self, project: str) -> list[AgentRecord]:
        """Return the project's agents as they are now, by name."""
        entries = await self._agents.entries(f"{project}.*")
        there = (record for record in map(_present, entries) if record.versions)
        return sorted(there, key=lambda record: record.name)

    async def change(
        self, project: str, name: str, change: Callable[[AgentRecord | None], AgentRecord]
    ) -> AgentRecord:
        """Change an agent's document and return it; one returned as it was is not written.

        ``change`` is called again when another scheduler was faster.

        Raises:
            DsecError: what ``change`` raises; ``unavailable`` when the document cannot be written.
        """
        changed = await swap(self._agents, f"{project}.{name}", change, self._pause)
        self._learn(f"{project}.{name}", changed)
        return changed

    async def keep_contract(self, project: str, name: str, contract: WrittenContract) -> None:
        """Keep a contract beside its agent; an empty one is not kept."""
        if contract.sha256:
            key = f"{project}.{name}.{contract.sha256}"
            await self._contracts.put(key, ContractRecord(contract=contract.body))

    async def contract(self, project: str, name: str, digest: str) -> dict[str, Any]:
        """Return a contract; an empty one when there is none."""
        if not digest:
            return {}
        kept = _present(await self._contracts.get(f"{project}.{name}.{digest}"))
        found: dict[str, Any] = msgspec.json.decode(kept.contract)
        return found

    # --- Instances ----------------------------------------------------------------------------

    async def shards(self, project: str) -> dict[str, ShardRecord]:
        """Return the project's documents of instances, by their names."""
        entries = await self._shards.entries(f"{project}.*")
        return {entry.key.rpartition(".")[2]: _present(entry) for entry in entries}

    async def all_shards(self) -> Known:
        """Return the documents of all projects; who asks while they are read gets the same.

        So when many nodes have missed something at once, they are read a few times, not once each.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all(), name="read instances")
        return await asyncio.shield(self._reading)

    async def _read_all(self) -> Known:
        found = {}
        for entry in await self._shards.entries():
            project, _, shard = entry.key.partition(".")
            found[project, shard] = _present(entry)
        return Known(found)

    async def change_shards(self, project: str, changes: Mapping[str, ShardChange]) -> None:
        """Change documents, all at once; a change that returns None writes nothing.

        What comes for a document while it is being written is written together, next: however
        many nodes report, each document is written once at a time.

        Raises:
            DsecError: ``unavailable`` when one cannot be written; others may be.
        """
        done = [self._queued(f"{project}.{shard}", change) for shard, change in changes.items()]
        await asyncio.gather(*done)

    def _queued(self, key: str, change: ShardChange) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append((change, done))
        if key not in self._writers:
            task = asyncio.create_task(self._write_shard(key), name=f"write {key}")
            self._writers[key] = task
        return done

    async def _write_shard(self, key: str) -> None:
        try:
            while waiting := self._waiting.pop(key, None):
                changes = [change for change, _ in waiting]
                error: DsecError | None = None
                try:
                    await swap(self._shards, key, _one_of(changes), self._pause)
                except DsecError as raised:
                    error = raised
                for _, done in waiting:
                    if done.done():
                        continue
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(error)
        finally:
            del self._writers[key]

    async def _pause(self, attempt: int) -> None:
        longest_s = min(_FIRST_PAUSE_S * 2**attempt, _LAST_PAUSE_S)
        await self._clock.sleep(longest_s * self._random.random())


_EMPTY: Final = ShardRecord(message_id=NOTHING)


def _one_of(changes: Sequence[ShardChange]) -> Callable[[ShardRecord | None], ShardRecord]:
    """Return the change that does all of them, one after the other."""

    def changed(shard: ShardRecord | None) -> ShardRecord:
        now = _EMPTY if shard is None else shard
        for change in changes:
            now = change(now) or now
        return now

    return changed


def _present(entry: Entry[DocumentT]) -> DocumentT:
    assert entry.value is not None  # noqa: S101  an entry that was found has a value
    return entry.value
