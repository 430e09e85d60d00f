"""Brings this node's instances of agents under their policies, and says when they are.

Rules are kept before they are enforced, so that a daemon that dies in between goes on with them.
What a policy takes away stays taken: an instance that cannot be brought under it is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Final, Protocol

import msgspec
import structlog

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.agent import AGENT_SOCKET, AgentPolicy, Refusal, check_policy
from dsec_common.wire.agent_node import AgentRules, GovernNode, NodeGoverned
from dsec_common.wire.network import NetworkInfo, NetworkPolicy
from dsec_common.wire.node import PlaceSandbox
from dsec_common.wire.sandbox import SandboxState
from dsec_sandboxd.events import DrainAsked, PauseAsked, ResumeAsked
from dsec_sandboxd.governance import Governance, only_pins
from dsec_sandboxd.lifecycle import Sandboxes
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state_database import StateDatabase

_log: Final = structlog.get_logger(__name__)

_PREFIX: Final = b"agent|"
_AT_ONCE: Final = 64
_FREE: Final = AgentPolicy()
_NO_NETWORK: Final = NetworkPolicy()
#: With these the sandbox is over, and nothing is to be enforced any more.
_OVER: Final = frozenset({ErrorCode.EXPIRED, ErrorCode.NOT_FOUND})
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(AgentRules)


class PolicyNetworks(Protocol):
    """The part of the node that enforces network policies."""

    def is_touched_by(self, record: SandboxRecord, policy: NetworkPolicy) -> bool:
        """Return whether a policy changes anything for a sandbox."""
        ...

    async def set_policy(self, record: SandboxRecord, policy: NetworkPolicy) -> NetworkInfo:
        """Put a running sandbox under another policy."""
        ...

    async def take_away(self, record: SandboxRecord) -> None:
        """Leave a running sandbox without a network, whatever its agent's policy says."""
        ...


class SocketRates(Protocol):
    """The part of the node that limits how often agents ask."""

    def limit_rate(self, local: str, per_s: float | None) -> None:
        """Let a sandbox ask so often; None for as often as any."""
        ...


class Governing:
    """Keeps the rules of agents and enforces them."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        database: StateDatabase,
        networks: PolicyNetworks,
        rates: SocketRates | None,
    ) -> None:
        """Take the parts; without ``rates``, a policy that limits them is refused."""
        self._sandboxes = sandboxes
        self._database = database
        self._networks = networks
        self._rates = rates
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._instances: dict[str, tuple[str, str]] = {}
        self._in_force: dict[str, AgentPolicy] = {}
        self._leaving: set[str] = set()
        self.governance = Governance()
        #: Told of an instance that no policy pauses any more; True: for another reason it is not
        #: to go on yet, and whoever has it stand still sees to that.
        self.stands_still: Callable[[SandboxRecord], bool] = lambda _record: False
        #: Told of an instance that may reach something else than before, by its policy.
        self.network_changed: Callable[[SandboxRecord], None] = lambda _record: None

    def load(self) -> None:
        """Read the rules that an earlier daemon kept."""
        for key, value in self._database.items(_PREFIX):
            if not key.startswith(_PREFIX):
                break
            try:
                self.governance.put(_decoder.decode(value))
            except msgspec.DecodeError as error:
                _log.error("rules_unreadable", key=repr(key), error=str(error))

    # --- Being told ---------------------------------------------------------------------------

    async def govern(self, request: Request[GovernNode]) -> NodeGoverned:
        """Take rules in and answer when they are in force.

        Raises:
            DsecError: ``unsupported`` when this node cannot enforce them, and nothing has changed;
                ``unavailable`` when they cannot be kept.
        """
        told = request.message.rules
        self._check(told.policies.values())
        instances, refused = await self.apply(told)
        return NodeGoverned(
            cause_id=request.message.message_id, instances=instances, refused=tuple(refused)
        )

    def _check(self, policies: Iterable[AgentPolicy]) -> None:
        for policy in policies:
            check_policy(policy)
            if policy.rate_limits and self._rates is None:
                raise DsecError(
                    ErrorCode.UNSUPPORTED, "this node has no agent sockets to limit the rate of"
                )

    async def apply(self, told: AgentRules) -> tuple[int, list[Refusal]]:
        """Keep rules and enforce them; return how many instances are under them, and which not.

        Raises:
            DsecError: ``unavailable`` when they cannot be kept; then nothing has changed.
        """
        before = self.governance.rules(told.project, told.name)
        now = self._keep(told)
        only = None if now is None else only_pins(before, now)
        async with self._turn:
            records = self.instances(told.project, told.name, only)
            refused = await self._enforce(records)
        return len(records) - len(refused), refused

    def _keep(self, told: AgentRules) -> AgentRules | None:
        """Keep what holds now, and return it if that is something else than before."""
        # Of single sandboxes only those that are here: what is told of others would stay for ever.
        here = self._sandboxes.state.is_living
        pinned = {local: number for local, number in told.pinned.items() if here(local)}
        now = self.governance.after(msgspec.structs.replace(told, pinned=pinned))
        if now is None:
            return None
        key = _PREFIX + f"{told.project}|{told.name}".encode()
        try:
            self._database[key] = _encoder.encode(now)
        except Exception as error:  # rocksdict raises plain Exception
            raise DsecError(
                ErrorCode.UNAVAILABLE, f"the StateDB refuses the rules of {told.name}: {error}"
            ) from error
        self.governance.put(now)
        return now

    def instances(
        self, project: str = "", agent: str = "", only: frozenset[str] | None = None
    ) -> list[SandboxRecord]:
        """Return the records of this node's instances: all, an agent's, or ``only`` some of its."""
        known = self._instances
        locals_ = known if only is None else [local for local in only if local in known]
        return [
            self._sandboxes.state.find(known[local][0], local)
            for local in locals_
            if not project or known[local] == (project, agent)
        ]

    # --- A sandbox's life ---------------------------------------------------------------------

    def placing(self, place: PlaceSandbox) -> None:
        """Learn what a placement tells of its agent.

        Raises:
            DsecError: ``denied`` when the agent is paused.
        """
        rules, request = place.agent_rules, place.request
        if rules is None:
            return
        if self._keep(rules) and self.instances(rules.project, rules.name):
            self._start(self.apply(rules))
        known = self.governance.rules(place.project, request.agent)
        revision = 0 if known is None else known.versions.get(request.agent_version, 0)
        policy = _FREE if known is None else known.policies.get(revision, _FREE)
        if policy.paused:
            raise _paused(request.agent, revision)

    def network_of(self, record: SandboxRecord) -> NetworkPolicy | None:
        """Return what a sandbox may reach, or None when that is its owner's to say."""
        if not record.agent_version:
            return None
        policy = self.governance.policy(record) or _FREE
        if record.state is SandboxState.CREATING:
            self._in_force[record.local] = msgspec.structs.replace(_FREE, **_network_part(policy))
        return policy.governed_network

    def check_awake(self, record: SandboxRecord) -> None:
        """Return if requests may have a sandbox run.

        Raises:
            DsecError: ``denied`` when a policy pauses it.
        """
        if self.is_paused(record):
            raise _paused(record.agent, self.governance.revision(record.project, record.agent))

    def is_paused(self, record: SandboxRecord) -> bool:
        """Return whether a policy has a sandbox stand still."""
        policy = self.governance.policy(record)
        return policy is not None and policy.paused

    def began(self, record: SandboxRecord) -> None:
        """Note that an instance runs; what is not in force of its policy follows."""
        self._instances[record.local] = (record.project, record.agent)
        policy = self.governance.policy(record) or _FREE
        if policy != self._in_force.get(record.local, _FREE) or self.governance.is_leaving(record):
            self._start(self._again([record]))

    def ended(self, record: SandboxRecord) -> None:
        """Forget an instance."""
        self._instances.pop(record.local, None)
        self._in_force.pop(record.local, None)
        self._leaving.discard(record.local)
        self.governance.forget(record)

    async def _again(self, records: Sequence[SandboxRecord]) -> None:
        async with self._turn:
            await self._enforce(records)

    def _start(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is being enforced."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- Enforcing ----------------------------------------------------------------------------

    async def _enforce(self, records: Sequence[SandboxRecord]) -> list[Refusal]:
        """Bring sandboxes under the rules that are known; return those for which it failed."""
        slow = []
        for record in records:
            local = record.local
            policy = self.governance.policy(record) or _FREE
            before = self._in_force.get(local, _FREE)
            if self.governance.is_leaving(record) and local not in self._leaving:
                self._leave(record)
            if policy == before:
                continue
            self._in_force[local] = policy
            if policy.rate_limits != before.rate_limits and self._rates is not None:
                self._rates.limit_rate(local, policy.rate_limits.get(AGENT_SOCKET))
            wanted = policy.governed_network or record.network or _NO_NETWORK
            is_elsewhere = policy.governed_network != before.governed_network
            if is_elsewhere:
                self.network_changed(record)
            if policy.paused != before.paused or (
                is_elsewhere and self._networks.is_touched_by(record, wanted)
            ):
                slow.append((record, before, policy))
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(
            record: SandboxRecord, before: AgentPolicy, policy: AgentPolicy
        ) -> Refusal | None:
            async with places:
                return await self._enforce_slowly(record, before, policy)

        refusals = await asyncio.gather(*(one(*each) for each in slow))
        return [refusal for refusal in refusals if refusal is not None]

    async def _enforce_slowly(
        self, record: SandboxRecord, before: AgentPolicy, policy: AgentPolicy
    ) -> Refusal | None:
        """Do what takes the kernel's work."""
        refusal = None
        try:
            if policy.governed_network != before.governed_network:
                wanted = policy.governed_network or record.network or _NO_NETWORK
                refusal = await self._set_network(record, wanted)
            if policy.paused != before.paused:
                await self._turn_to(record, paused=policy.paused)
        except DsecError as error:
            state = self._sandboxes.state
            if error.code in _OVER or not state.is_living(record.local) or state.draining:
                return None
            return await self._refused(record, error)
        except BaseException:
            self._in_force[record.local] = before  # so that it is tried again
            raise
        return refusal

    async def _set_network(self, record: SandboxRecord, wanted: NetworkPolicy) -> Refusal | None:
        """Put a sandbox under a network policy; under none, if that is not for this node."""
        try:
            await self._networks.set_policy(record, wanted)
        except DsecError as error:
            if error.code not in {ErrorCode.INVALID, ErrorCode.UNSUPPORTED}:
                raise
            await self._networks.take_away(record)
            return Refusal(
                what=f"{self._sandboxes.node}.{record.local}",
                code=error.code,
                reason=f"has no network, for the policy's is not possible here: {error.message}",
            )
        return None

    async def _turn_to(self, record: SandboxRecord, *, paused: bool) -> None:
        if not paused and self.stands_still(record):
            return  # it goes on when it may
        wanted = SandboxState.PAUSED if paused else SandboxState.RUNNING
        on_the_way = {SandboxState.PAUSING, SandboxState.RESUMING}
        while (
            state := self._sandboxes.state.running(record.project, record.local).state
        ) != wanted:
            if state not in on_the_way:
                event = PauseAsked if paused else ResumeAsked
                self._sandboxes.handle(event(local=record.local))
            await self._sandboxes.turn(record.local)

    def _leave(self, record: SandboxRecord) -> None:
        rules = self.governance.rules(record.project, record.agent)
        if rules is None:
            return
        self._leaving.add(record.local)
        clock = self._sandboxes.parts.clock
        self._sandboxes.handle(
            DrainAsked(
                now=clock.now(),
                monotonic_s=clock.monotonic(),
                local=record.local,
                idle_s=rules.drain_idle_s,
                timeout_s=rules.drain_timeout_s,
            )
        )

    async def _refused(self, record: SandboxRecord, error: DsecError) -> Refusal:
        """End a sandbox that cannot be brought under its policy."""
        node = self._sandboxes.node
        _log.error("policy_not_enforced", local=record.local, error=str(error))
        try:
            await self._sandboxes.end(record.local)
        except DsecError as end_error:  # the core goes on trying
            _log.info("deletion_goes_on", local=record.local, error=str(end_error))
        return Refusal(
            what=f"{node}.{record.local}",
            code=error.code,
            reason=f"ended, for it could not be brought under the policy: {error.message}",
        )


def _network_part(policy: AgentPolicy) -> dict[str, object]:
    return {"revoked": policy.revoked, "network": policy.network}


def _paused(agent: str, revision: int) -> DsecError:
    return DsecError(
        ErrorCode.DENIED,
        f"the policy of agent {agent} (revision {revision}) has its instances stand still; push "
        "another policy to have them go on",
        details={"agent": agent, "revision": revision},
    )
