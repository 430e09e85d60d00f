"""Chronus's shell: which shards this process owns, and the door for new rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any, ClassVar, Final

import structlog

from dsec_chronus import metrics
from dsec_chronus.config import ChronusConfig
from dsec_chronus.errors import shard_moving, too_large
from dsec_chronus.group_opening import GroupOpening
from dsec_chronus.journal import FencedError, journal_stream
from dsec_chronus.keys import rollout_id_of
from dsec_chronus.leases import BUCKET, Held, Lease, Leases
from dsec_chronus.node_watch import NodeWatch
from dsec_chronus.shard import Shard
from dsec_common import subjects
from dsec_common.bus import KeyValue, Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.retry import until_available
from dsec_common.service import Service
from dsec_common.wire.base import Message, new_id
from dsec_common.wire.rollout import OpenRollout, RolloutOpened
from dsec_common.wire.rollout_group import OpenGroup, TakeGroup

log = structlog.get_logger()

QUEUE: Final = "chronus"
KEY_CHARACTERS_MAX: Final = 256

_RENEWALS_PER_LEASE: Final = 4
_OPEN_TIMEOUT_S: Final = 5.0


class ChronusService(Service[ChronusConfig]):
    """Any number of these share the shards; each answers for those that it owns."""

    name: ClassVar[str] = "chronus"

    def __init__(self, config: ChronusConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self.process = new_id()
        self._leases: Leases
        self._held: dict[str, Held] = {}
        self._shards: dict[str, Shard] = {}
        self._loaded = asyncio.Event()
        self._wake = asyncio.Event()
        self._balancing = asyncio.Lock()
        self._leaving = False

    # --- The life cycle -----------------------------------------------------------------------

    async def open(self) -> None:
        """Open the journal and the bucket of leases, waiting for JetStream."""
        await until_available(
            "the stream of journals",
            lambda: self.bus.ensure_stream(journal_stream(self.config.replicas)),
            self.clock,
        )
        bucket = await until_available(
            f"the bucket {BUCKET}",
            lambda: self.bus.kv(BUCKET, Lease, replicas=self.config.replicas),
            self.clock,
        )
        self._leases = Leases(bucket, self.process, self.config.lease_ttl_s, self.clock)
        await self.bus.register(
            "dsec-chronus", version("dsec"), "Rollouts: the mailbox of sandboxes and trainers"
        )
        self.spawn(self._watch(bucket), "watch leases")
        await self._loaded.wait()

    async def recover(self) -> None:
        """Take the shards that are free, so that whoever is told "ready" finds them."""
        await self._renew()
        self.spawn(self._keep_lease(), "keep the lease")
        await self._balance()

    async def subscribe(self) -> None:
        """Take requests to open rollouts; each shard takes its own requests."""
        await self.bus.serve(
            subjects.any_project("rollout.open"),
            OpenRollout,
            self._open_rollout,
            queue=QUEUE,
            concurrency=1024,
        )
        groups = GroupOpening(self.bus, self.config.shards)
        await self.bus.serve(
            subjects.any_project("rollout.take_group"), TakeGroup, groups.take, queue=QUEUE
        )
        await self.bus.serve(
            subjects.any_project("rollout.open_group"), OpenGroup, groups.open, queue=QUEUE
        )
        self.spawn(self._keep_balance(), "keep balance")
        watch = NodeWatch(self.bus, self.clock, self.config.node_lost_s)
        await watch.start()
        self.spawn(self._sweep(watch), "sweep")

    async def quiesce(self) -> None:
        """Hand every shard over: what waits for the journal is finished first."""
        self._leaving = True
        if hasattr(self, "_leases"):
            await self._renew()
        async with self._balancing:
            await asyncio.gather(
                *(self._give(shard, self.config.drain_timeout_s) for shard in list(self._held))
            )
            if hasattr(self, "_leases"):
                await self._attempt("leave", self._leases.end())

    # --- The door -----------------------------------------------------------------------------

    async def _open_rollout(self, request: Request[OpenRollout]) -> Message | None:
        """Open a rollout here, or have the owner of its shard do it.

        Its id is made of the project and the idempotency key, so the same key finds the same
        rollout through whichever process.
        """
        project = subjects.project_of(request.subject)
        key = request.message.idempotency_key
        if len(key) > KEY_CHARACTERS_MAX:
            raise too_large("the idempotency key", len(key), KEY_CHARACTERS_MAX, "characters")
        rollout_id = rollout_id_of(project, key or new_id(), self.config.shards)
        shard = self._shards.get(rollout_id.owner)
        if shard is not None:
            await shard.open(request, project, rollout_id)
            return None
        try:
            return await self.bus.request(
                subjects.rollout_system(project, rollout_id, "open"),
                request.message,
                RolloutOpened,
                timeout_s=_OPEN_TIMEOUT_S,
            )
        except DsecError as error:
            if error.code in {ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT}:
                raise shard_moving(rollout_id.owner) from error
            raise

    # --- Shards and leases --------------------------------------------------------------------

    async def _watch(self, bucket: KeyValue[Lease]) -> None:
        async for entry in bucket.watch():
            if entry is None:
                await self._attempt("look", self._look_at_held())
                self._loaded.set()
                continue
            if self._leases.saw(entry):
                self._wake.set()
            for held in [held for held in self._held.values() if self._leases.is_lost(held)]:
                self._lose(held, "another process took it")

    async def _look_at_held(self) -> None:
        """Let go of what the bucket, after a lost connection, does not know as ours any more."""
        for held in list(self._held.values()):
            if not await self._leases.holds(held):
                self._lose(held, "the bucket does not know it as ours")

    async def _keep_balance(self) -> None:
        """Look for free shards when one may have become so, and now and then."""
        while True:
            self._wake.clear()
            pause_s = self.config.lease_ttl_s if self._is_balanced else self._pace_s
            timer = asyncio.get_running_loop().call_later(pause_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            await self._balance()

    @property
    def _pace_s(self) -> float:
        return self.config.lease_ttl_s / _RENEWALS_PER_LEASE

    @property
    def _is_balanced(self) -> bool:
        return not any(self._leases.plan(self.config.shard_names, self._held))

    async def _balance(self) -> None:
        async with self._balancing:
            if self._leaving:
                return
            plan = self._leases.plan(self.config.shard_names, self._held)
            for shard in plan.give:
                await self._give(shard, self.config.drain_timeout_s)
            await asyncio.gather(*(self._take(shard) for shard in plan.take))
            metrics.SHARDS.set(len(self._shards))

    async def _take(self, name: str) -> None:
        try:
            held = await self._leases.take(name)
            if held is None:
                return
            self._held[name] = held
            await self._start_shard(held)
        except (DsecError, FencedError) as error:
            metrics.TAKEOVERS.labels("failed").inc()
            log.warning("a shard was not taken", shard=name, error=str(error))
            if (held := self._held.pop(name, None)) is not None:
                await self._let_go(held)
        else:
            metrics.TAKEOVERS.labels("taken").inc()

    async def _start_shard(self, held: Held) -> None:
        shard = Shard(
            held.shard,
            self.bus,
            self.config,
            self.clock,
            is_owner=lambda: self._owns(held),
            is_leaving=lambda: self._leaving,
            on_end=lambda error: self._ended(held, error),
        )
        try:
            await shard.start()
        except BaseException:
            await shard.abandon()
            raise
        if self._held.get(held.shard) is not held:
            # Let go of while it was read; whoever has it now must be the only one to answer.
            await shard.abandon()
            raise FencedError(f"{held.shard} was lost while it was read")
        self._shards[held.shard] = shard
        log.info("took a shard", shard=held.shard, rollouts=shard.core.rollouts)

    def _owns(self, held: Held) -> bool:
        return self._held.get(held.shard) is held and self._leases.in_force

    def _ended(self, held: Held, error: Exception) -> None:
        if isinstance(error, FencedError):
            self._lose(held, str(error))
        else:
            self.fail(error)

    def _lose(self, held: Held, why: str) -> None:
        """Let go of a shard in the background, unless that has begun."""
        if self._held.get(held.shard) is held:
            log.warning("lost a shard", shard=held.shard, error=why)
            del self._held[held.shard]
            self.spawn(self._let_go(held), f"let go of {held.shard}")

    async def _give(self, name: str, timeout_s: float) -> None:
        """End a shard in order and free it for others."""
        shard = self._shards.pop(name, None)
        if shard is not None:
            await shard.stop(timeout_s)
            log.info("gave up a shard", shard=name)
        held = self._held.pop(name, None)
        if held is not None:
            await self._attempt(f"free {name}", self._leases.give(held))

    async def _let_go(self, held: Held) -> None:
        """End a shard that is lost, at once."""
        shard = self._shards.pop(held.shard, None)
        if shard is not None:
            await shard.abandon()
        # Ours still when only the journal did not answer; another's otherwise, and kept so.
        await self._attempt(f"free {held.shard}", self._leases.give(held))
        self._wake.set()

    async def _keep_lease(self) -> None:
        while self._held or not self._leaving:
            await self.clock.sleep(self._pace_s)
            await self._renew()

    async def _renew(self) -> None:
        """Prolong our lease; let go of all that we held by one that ran out."""
        without_gap = self._leases.in_force
        try:
            if self.bus.connected:
                async with asyncio.timeout(self._pace_s):
                    without_gap = await self._leases.renew(leaving=self._leaving)
        except (TimeoutError, DsecError) as error:
            log.warning("the lease was not renewed", error=str(error) or "no answer in time")
        if without_gap and self._leases.in_force:
            return
        for held in list(self._held.values()):
            self._lose(held, "the lease ran out")
        self._wake.set()

    async def _attempt(self, what: str, step: Coroutine[Any, Any, None]) -> None:
        """Do what helps others but is not needed: without it, leases run out by themselves."""
        if not self.bus.connected:
            step.close()
            return
        try:
            await step
        except DsecError as error:
            log.warning("the bucket of leases did not answer", step=what, error=error.message)

    async def _sweep(self, watch: NodeWatch) -> None:
        while True:
            await self.clock.sleep(self.config.sweep_interval_s)
            nodes: set[str] = set()
            for shard in list(self._shards.values()):
                await shard.sweep()
                nodes |= shard.nodes
            seen = watch.look(nodes)
            for shard in list(self._shards.values()):
                await shard.nodes_seen(seen)
            metrics.ROLLOUTS.set(sum(shard.core.rollouts for shard in self._shards.values()))
            metrics.POLLS.set(sum(shard.core.polls for shard in self._shards.values()))
