"""The networks of a node's sandboxes: attached, changed and let go of, one step at a time each.

The router is made when the first sandbox needs one: without a network nothing is spent here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import structlog

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.network_policy import Address, Compiled, compile_policy
from dsec_common.wire.network import (
    NetworkInfo,
    NetworkPhase,
    NetworkPolicy,
    needs_outside,
)
from dsec_common.wire.node import UPLINK
from dsec_sandboxd.kernel.interface import Kernel
from dsec_sandboxd.network import phases
from dsec_sandboxd.network.memory import Memory, Remembered
from dsec_sandboxd.network.netlink import Netlink
from dsec_sandboxd.network.node_addresses import NodeAddresses
from dsec_sandboxd.network.plan import Numbers, Port, Rules
from dsec_sandboxd.network.policy import needs_network, no_outside
from dsec_sandboxd.network.refusals import Samples, refusals
from dsec_sandboxd.network.resolv_conf import write_resolv_conf
from dsec_sandboxd.network.resolver import Resolver
from dsec_sandboxd.network.resting import Resting
from dsec_sandboxd.network.router import Router
from dsec_sandboxd.network.settings import DenialLog, NetworkSettings
from dsec_sandboxd.network.tracking import Marks
from dsec_sandboxd.network.turns import Turns
from dsec_sandboxd.network.uplink import Uplink
from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)


T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    record: SandboxRecord
    port: Port
    remembered: Remembered
    prepared: asyncio.Future[None] | None = None
    names: Samples = field(default_factory=Samples)


class Networks:
    """All networks of one node.

    Args:
        node: its name.
        kernel: has the sandboxes.
        directory: on a tmpfs; what must outlive the daemon is kept in it.
        settings: from the configuration.
        on_denied: is told of samples of what was refused.
    """

    def __init__(
        self,
        node: str,
        kernel: Kernel,
        directory: Path,
        settings: NetworkSettings,
        on_denied: DenialLog,
    ) -> None:
        self._kernel = kernel
        self._settings = settings
        self._on_denied = on_denied
        self._memory = Memory(directory / "sandboxes")
        self._rules = Rules(settings.plan, settings.denied, settings.connections_max)
        self._router = Router(directory / "router", node, settings.plan, self._rules)
        self._uplink = Uplink(settings.uplink)
        self._kept_at = directory / "router"
        self._numbers = Numbers()
        self._resting = Resting()
        self._members: dict[str, _Member] = {}
        self._by_number: dict[int, _Member] = {}
        self._ports: dict[int, Port] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._opening = asyncio.Lock()
        self._open = False
        self._marks = Marks()
        self._resolver: Resolver | None = None
        self._refusals: Netlink | None = None
        self._turns = Turns()
        self._node_addresses = NodeAddresses(
            lambda now: self._run(self._router.set_node_addresses, now)
        )
        self.is_remaking: Callable[[str], bool] = lambda _local: False
        #: What its agent's policy has a sandbox reach, whatever is asked; None for what is asked.
        self.governed: Callable[[SandboxRecord], NetworkPolicy | None] = lambda _record: None
        self.check_running: Callable[[SandboxRecord], object] = lambda _record: None

    # --- Before anything starts ---------------------------------------------------------------

    async def check(self, *policies: NetworkPolicy | None) -> None:
        """Refuse policies that are wrong, or that this host cannot enforce.

        Raises:
            DsecError: ``invalid``, ``unsupported``.
        """
        for policy in policies:
            if policy is not None:
                self._compile(policy)
        await self._ready_for(*policies)

    async def _ready_for(self, *policies: NetworkPolicy | None) -> None:
        outside = any(map(needs_outside, policies))
        if outside and (why := self._uplink.lacking()):
            raise no_outside(why)
        if any(map(needs_network, policies)):
            await self._ready()
        if outside and not self._uplink.leads:
            async with self._opening:
                await self._lead_outside()
            if why := self._uplink.missing():
                raise no_outside(why)

    async def _lead_outside(self) -> None:
        if not self._uplink.leads:
            await self._uplink.lead(lambda to: self._run(self._router.connect_outside, to))

    @property
    def missing(self) -> dict[str, str]:
        """What this node cannot give any sandbox, with reasons, as far as it is known."""
        why = self._uplink.missing()
        return {UPLINK: why} if why else {}

    def _compile(self, policy: NetworkPolicy) -> Compiled:
        return compile_policy(policy, self._settings.rule_sets)

    # --- A sandbox's life ---------------------------------------------------------------------

    def expect(self, record: SandboxRecord) -> None:
        """Begin with the rules of a sandbox that is being made, if it is to have a network.

        Either :meth:`attach` follows, or :meth:`sandbox_ending`.

        Raises:
            DsecError: ``exhausted`` when all addresses are in use, or the disk is full.
        """
        first = self._first_policy(record)
        if first is not None and self._open:
            self._begin(record, *first)

    async def attach(self, record: SandboxRecord) -> None:
        """Give a sandbox that nothing runs in yet the network that was asked for with it.

        One that is made anew under its id gets what was in force.

        Raises:
            DsecError: what the kernel refused; then it has none.
        """
        async with self._turns.of(record.local):
            member = self._members.get(record.local)
            first = self._first_policy(record)
            if member is None and first is not None:
                await self._ready()
                member = self._begin(record, *first)
            if member is not None:
                await self._connect(member)

    def inherited(self, local: str) -> tuple[NetworkPolicy | None, NetworkPolicy | None]:
        """Return what a sandbox's child begins with; see :func:`~.phases.inherited`."""
        return phases.inherited(self._memory.get(local))

    def _first_policy(self, record: SandboxRecord) -> phases.First | None:
        if self.is_remaking(record.local):
            return phases.as_remembered(self._memory.get(record.local))
        return phases.as_asked(record, self.governed(record))

    def _begin(
        self,
        record: SandboxRecord,
        policy: NetworkPolicy,
        phase: NetworkPhase,
        agent: NetworkPolicy | None,
    ) -> _Member:
        compiled = self._compile(policy)
        number = self._numbers.take()
        port = Port(number, mark=self._marks.fresh(number), policy=compiled)
        remembered = Remembered(
            number=port.number, mark=port.mark, policy=policy, phase=phase, agent=agent
        )
        try:
            self._memory.put(record.local, remembered)
        except DsecError:
            self._numbers.give_back(port.number)
            raise
        member = _Member(record, port, remembered)
        member.prepared = asyncio.ensure_future(self._run(self._router.prepare, port))
        self._admit(member)
        return member

    async def _connect(self, member: _Member) -> None:
        local = member.record.local
        try:
            if member.prepared is not None:
                await asyncio.shield(member.prepared)
            namespace_fd = self._kernel.network_namespace(local)
            try:
                done = await asyncio.gather(
                    self._run(self._router.connect, member.port, namespace_fd),
                    write_resolv_conf(self._kernel, local, self._settings.plan.resolver[0]),
                    return_exceptions=True,
                )
            finally:
                os.close(namespace_fd)
            if failed := next(filter(None, done), None):
                raise failed  # noqa: TRY301  one of two done at once
        except BaseException:
            await asyncio.shield(self._let_go(member))
            raise

    def _admit(self, member: _Member) -> None:
        self._members[member.record.local] = member
        self._by_number[member.port.number] = member
        self._ports[member.port.number] = member.port

    async def sandbox_ending(self, local: str) -> None:
        """Cut a sandbox off, before it is removed. Idempotent."""
        async with self._turns.of(local):
            member = self._members.get(local)
            if member is not None:
                await self._let_go(member)

    async def _let_go(self, member: _Member) -> None:
        with contextlib.suppress(DsecError):  # it ended by itself: its namespace is gone
            self._resting.add(self._kernel.network_namespace(member.record.local))
        local, number = member.record.local, member.port.number
        self._members.pop(local, None)
        self._by_number.pop(number, None)
        self._ports.pop(number, None)
        try:
            # The one thread does them in their order; what was not prepared needs no detaching.
            if member.prepared is None or await _succeeded(member.prepared):
                await self._run(self._router.detach, member.port)
        except DsecError as error:
            # Nothing is handed out twice: its number stays taken until the daemon starts anew.
            _log.warning("network_rules_left", local=local, error=str(error))
        else:
            self._numbers.give_back(number)
        if not self.is_remaking(local):
            self._memory.forget(local)

    def is_touched_by(self, record: SandboxRecord, policy: NetworkPolicy) -> bool:
        """Return whether a policy changes anything for a sandbox: it has a network, or gets one."""
        local = record.local
        return local in self._members or self._turns.is_taken(local) or needs_network(policy)

    # --- Changes ------------------------------------------------------------------------------

    async def set_policy(self, record: SandboxRecord, policy: NetworkPolicy) -> NetworkInfo:
        """Put a running sandbox under another policy; its phase stays.

        Of several at once the one that was asked for last is in force in the end.

        Raises:
            DsecError: ``invalid``; ``unsupported``; ``expired``; then nothing has changed.
        """
        async with self._turns.of(record.local):
            policy = self.governed(record) or policy
            compiled = self._compile(policy)
            await self._ready_for(policy)
            member = self._members.get(record.local)
            if member is not None:
                kept = member.remembered
                await self._change(member, compiled, policy, kept.phase, kept.agent)
            elif self.is_remaking(record.local):
                raise unavailable("the sandbox is being put back: try again in a moment")
            elif needs_network(policy):
                self.check_running(record)  # it may have ended while others had their turn
                await self._connect(self._begin(record, policy, NetworkPhase.AGENT, None))
        return await self.info(record)

    async def take_away(self, record: SandboxRecord) -> None:
        """Leave a running sandbox without a network, whatever its agent's policy says.

        Raises:
            DsecError: ``unavailable`` while it is put back; ``internal`` when the kernel refuses.
        """
        async with self._turns.of(record.local):
            member = self._members.get(record.local)
            if member is not None:
                kept = member.remembered
                await self._change(member, Compiled(), NetworkPolicy(), kept.phase, kept.agent)
            elif self.is_remaking(record.local):
                raise unavailable("the sandbox is being put back: try again in a moment")

    async def enter_agent_phase(self, record: SandboxRecord) -> NetworkInfo:
        """Put a sandbox under the policy for its agent, for good. Repeating it changes nothing.

        Raises:
            DsecError: ``internal`` when the kernel refuses; then the policy before stays in force.
        """
        async with self._turns.of(record.local):
            member = self._members.get(record.local)
            agent = member.remembered.agent if member is not None else None
            if member is not None and agent is not None:
                agent = self.governed(record) or agent
                await self._change(member, self._compile(agent), agent, NetworkPhase.AGENT, None)
        return await self.info(record)

    async def _change(
        self,
        member: _Member,
        compiled: Compiled,
        policy: NetworkPolicy,
        phase: NetworkPhase,
        agent: NetworkPolicy | None,
    ) -> None:
        before, old = member.port, member.remembered
        after = Port(before.number, mark=self._marks.fresh(before.number), policy=compiled)
        member.remembered = Remembered(
            number=after.number, mark=after.mark, policy=policy, phase=phase, agent=agent
        )
        self._memory.put(member.record.local, member.remembered)
        member.port = self._ports[after.number] = after
        try:
            await self._run(self._router.change, before, after)
        except DsecError:
            member.remembered, member.port = old, before
            self._ports[before.number] = before
            self._memory.put(member.record.local, old)
            raise

    # --- Looking ------------------------------------------------------------------------------

    async def info(self, record: SandboxRecord) -> NetworkInfo:
        """Return the policy in force, the addresses, and how much was refused."""
        member = self._members.get(record.local)
        if member is None:
            none, phase = NetworkPolicy(), NetworkPhase.AGENT
            missing = self._uplink.missing()
            return NetworkInfo(
                sandbox_id=record.local, phase=phase, policy=none, outside_missing=missing
            )
        denied = await self._run(self._router.denied_packets, member.port)
        return NetworkInfo(
            sandbox_id=record.local,
            phase=member.remembered.phase,
            policy=member.remembered.policy,
            addresses=tuple(map(str, self.addresses(record.local))),
            denied_packets=denied + member.names.seen,
            outside_missing=self._uplink.missing(),
        )

    def addresses(self, local: str) -> tuple[Address, ...]:
        """Return a sandbox's own addresses, loopback aside."""
        member = self._members.get(local)
        return self._settings.plan.addresses(member.port.number) if member else ()

    # --- Starting and ending ------------------------------------------------------------------

    async def sandbox_adopted(self, record: SandboxRecord) -> None:
        """Take over the network of a sandbox that an earlier daemon made.

        Raises:
            DsecError: ``internal`` when it has one and nothing says under which policy.
        """
        remembered = self._memory.get(record.local)
        if remembered is None:
            if needs_network(record.network) or record.setup_network is not None:
                raise DsecError(ErrorCode.INTERNAL, "its network policy was lost")
            return
        compiled = self._compile(remembered.policy)
        port = Port(remembered.number, mark=remembered.mark, policy=compiled)
        self._numbers.claim(port.number)
        self._admit(_Member(record, port, remembered))

    async def recovered(self) -> None:
        """Take over the router with the adopted sandboxes, or remove what is left of one."""
        self._memory.keep_only(set(self._members))
        if self._members or self._kept_at.exists():
            await self._ready()
        if not self._members and self._open:
            await self._shut(keep=False)

    async def close(self) -> None:
        """Let go of all; the router stays for as long as sandboxes are connected to it."""
        self._resting.close()
        async with self._opening:
            if self._open:
                await self._shut(keep=bool(self._members))
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="router")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _ready(self) -> None:
        """Have the router open; whoever waits may be cancelled, and no half of one is left.

        Raises:
            DsecError: ``unsupported`` with what this host lacks.
        """
        if not self._open:
            await asyncio.shield(asyncio.create_task(self._open_up()))

    async def _open_up(self) -> None:
        async with self._opening:
            if self._open:
                return
            await self._run(self._router.open, list(self._ports.values()))
            try:
                await self._node_addresses.watch()
                await self._lead_outside()
                await self._serve()
            except BaseException:
                await self._shut(keep=False)
                raise
            self._open = True

    async def _serve(self) -> None:
        self._refusals = await self._run(self._router.refusal_socket)
        asyncio.get_running_loop().add_reader(self._refusals.fileno(), self._read_refusals)
        self._resolver = Resolver(
            self._settings.plan,
            self._ports,
            self._settings.upstreams,
            is_never=self.is_never,
            learn=self._learn,
            on_refused=self._name_refused,
        )
        await self._resolver.serve(await self._run(self._router.resolver_sockets))

    async def _shut(self, *, keep: bool) -> None:
        self._open = False
        refused, self._refusals = self._refusals, None
        if refused is not None:
            asyncio.get_running_loop().remove_reader(refused.fileno())
            refused.close()
        await self._node_addresses.close()
        resolver, self._resolver = self._resolver, None
        if resolver is not None:
            await resolver.close()
        await self._run(lambda: self._router.close(keep=keep))
        self._uplink.closed()

    # --- What the node and the kernel tell ----------------------------------------------------

    def is_never(self, address: Address) -> bool:
        """Return whether nothing is to reach an address, as far as the open router knows."""
        return address in self._node_addresses or self._rules.is_never(address)

    def _read_refusals(self) -> None:
        assert self._refusals is not None  # noqa: S101  else nothing reads
        try:
            data = self._refusals.receive()
        except OSError:  # more came than we could read: samples are missing, no more
            return
        for refusal in refusals(data):
            member = self._by_number.get(refusal.number)
            if member is not None:
                told = {"address": refusal.address, "protocol": refusal.protocol}
                if refusal.port:
                    told["port"] = str(refusal.port)
                self._on_denied(member.record, told)

    def _name_refused(self, number: int, name: str) -> None:
        member = self._by_number.get(number)
        if member is None:
            return
        if member.names.take(time.monotonic()):
            self._on_denied(member.record, {"name": name, "names_refused": str(member.names.seen)})

    async def _learn(self, port: Port, found: list[tuple[int, Address, float]]) -> bool:
        """Allow addresses of names in the kernel, as long as the policy is still the same."""
        same = self._ports.get(port.number) is port
        if not same or not port.remember(found, time.monotonic()):
            return False
        try:
            await self._run(self._router.learn, port, found)
        except DsecError as error:
            _log.info("address_not_learned", error=str(error))
            return False
        return self._ports.get(port.number) is port


async def _succeeded(work: asyncio.Future[None]) -> bool:
    await asyncio.wait({work})
    return not work.cancelled() and work.exception() is None
