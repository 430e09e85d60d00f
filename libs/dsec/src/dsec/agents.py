"""Agents: versions of them, their instances, and what those may do."""

from __future__ import annotations

import asyncio
import builtins
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.channel import ANSWER_PATIENCE_S, Channel
from dsec.network import Policy, network_policy
from dsec_common import subjects
from dsec_common.bus_types import ReplyT
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_common.wire.agent import (
    BATCH_MAX,
    PACKAGE_CHUNK_BYTES,
    PACKAGE_MAX_BYTES,
    AgentInfo,
    AgentList,
    AgentPolicy,
    AgentRemoved,
    AgentsUpdated,
    AgentUpdate,
    Governed,
    InspectAgent,
    InstanceInfo,
    InstanceList,
    ListAgents,
    ListInstances,
    PackagePieceKept,
    PushPolicy,
    RegisterAgent,
    RemoveAgent,
    RevokePermission,
    UpdateAgents,
    UpdateOutcome,
    UploadPackage,
    shard_of,
)
from dsec_common.wire.base import Message
from dsec_common.wire.consistency import (
    SYNCHRONISE_TIMEOUT_S,
    DependencyVersions,
    InstancesSynchronised,
    InstanceState,
    ListDependencies,
    ReportDependencies,
    SynchroniseInstances,
)

_TIMEOUT_S: Final = 15.0
_PIECES_AT_ONCE: Final = 4


class Agents:
    """The project's agents.

    A sandbox that is created with ``agent=NAME`` is an instance of the active version of that
    agent, once it is registered. Every change is durable when its method returns, and in force on
    all nodes but those that its answer names; asked again after a lost answer, nothing goes wrong.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    # --- Versions -----------------------------------------------------------------------------

    async def register(
        self,
        name: str,
        version: str,
        *,
        description: str = "",
        contract: Mapping[str, Any] | None = None,
        permissions: Iterable[str] = (),
        base: str = "",
        workspace: str = "",
        toolkits: Iterable[str] = (),
        package: bytes | str | Path | None = None,
        policy: AgentPolicy | None = None,
    ) -> AgentInfo:
        """Register a version. The first is active at once; later ones are once updated to.

        Args:
            name: lower-case letters, digits, ``_`` and ``-``.
            version: it never changes any more; the same again is fine.
            description: for listings.
            contract: kept as it is.
            permissions: what the agent needs.
            base: the base layer of instances whose requests name none.
            workspace: likewise.
            toolkits: on top of those that a request names.
            package: its bytes, or the path of a file; at most 50 MiB.
            policy: what its instances may do from the start; see :meth:`push_policy`.

        Raises:
            DsecError: ``invalid``; ``conflict`` when the version is registered with something else;
                ``unsupported`` for a policy that nothing enforces; ``exhausted`` when the project
                has as many agents as it may, or the agent as many versions.
        """
        if isinstance(permissions, str) or isinstance(toolkits, str):
            raise invalid("permissions and toolkits are lists, not one text")
        data = await _bytes_of(package)
        digest = await self._upload(data) if data else ""
        return await self._ask(
            "register",
            RegisterAgent(
                name=name,
                version=version,
                description=description,
                contract=dict(contract or {}),
                permissions=tuple(permissions),
                base=base,
                workspace=workspace,
                toolkits=tuple(toolkits),
                package_sha256=digest,
                package_bytes=len(data),
                policy=policy,
            ),
            AgentInfo,
        )

    async def _upload(self, data: bytes) -> str:
        if len(data) > PACKAGE_MAX_BYTES:
            raise invalid(
                f"the package has {len(data)} bytes: at most {PACKAGE_MAX_BYTES} are taken; leave "
                "out what the agent does not need, or put it into a layer",
                field="package",
            )
        digest = hashlib.sha256(data).hexdigest()
        places = asyncio.Semaphore(_PIECES_AT_ONCE)

        async def send(index: int, piece: bytes) -> None:
            async with places:
                upload = UploadPackage(sha256=digest, index=index, data=piece)
                await self._ask("upload", upload, PackagePieceKept)

        async with asyncio.TaskGroup() as group:
            for index in range(-(-len(data) // PACKAGE_CHUNK_BYTES)):
                start = index * PACKAGE_CHUNK_BYTES
                group.create_task(send(index, data[start : start + PACKAGE_CHUNK_BYTES]))
        return digest

    async def register_like(
        self, name: str, version: str, *, of: str, toolkits: Iterable[str]
    ) -> AgentInfo:
        """Register a version that differs from another one in its toolkits alone.

        Args:
            name: the agent.
            version: the new version.
            of: the other one.
            toolkits: in place of those of the other one.

        Raises:
            DsecError: ``not_found``; ``conflict`` when the version is registered with something
                else.
        """
        agent = await self.inspect(name)
        like = next((one for one in agent.versions if one.version == of), None)
        if like is None:
            raise not_found(f"{name} has no version {of[:64]!r}", agent=name, version=of[:64])
        return await self._ask(
            "register",
            RegisterAgent(
                name=name,
                version=version,
                description=agent.description,
                contract=like.contract,
                permissions=like.permissions,
                base=like.base,
                workspace=like.workspace,
                toolkits=tuple(toolkits),
                package_sha256=like.package_sha256,
                package_bytes=like.package_bytes,
            ),
            AgentInfo,
        )

    async def remove(self, name: str, version: str = "") -> tuple[str, ...]:
        """Remove a version that nobody uses, or an agent with all its versions.

        The packages go that no other version has; layers stay.

        Returns:
            The versions that are gone.

        Raises:
            DsecError: ``not_found``; ``conflict`` for a version that has instances, that new work
                goes to, or that it may go back to.
        """
        there = [one.version for one in (await self.inspect(name)).versions]
        try:
            removal = RemoveAgent(name=name, version=version)
            return (await self._ask("remove", removal, AgentRemoved)).versions
        except DsecError as error:
            # It was there: the answer to this very request may have been lost before.
            if error.code is not ErrorCode.NOT_FOUND or (version and version not in there):
                raise
        return (version,) if version else tuple(there)

    async def list(self, *, prefix: str = "", permission: str = "") -> builtins.list[AgentInfo]:
        """Return the project's agents by name: those whose names begin so and that need so."""
        found: list[AgentInfo] = []
        while True:
            after = found[-1].name if found else ""
            page = await self._ask(
                "list",
                ListAgents(prefix=prefix, permission=permission, after=after),
                AgentList,
            )
            found += page.agents
            if not page.more or not page.agents:
                return found

    async def inspect(self, name: str) -> AgentInfo:
        """Return an agent: its versions, their policies, and how many instances there are.

        Raises:
            DsecError: ``not_found``.
        """
        return await self._ask("inspect", InspectAgent(name=name), AgentInfo)

    async def instances(
        self, name: str, *, version: str = "", node: str = ""
    ) -> builtins.list[InstanceInfo]:
        """Return an agent's instances; they are known a second or two after they begin.

        Raises:
            DsecError: ``not_found``.
        """
        found: list[InstanceInfo] = []
        cursor = ""
        while True:
            page = await self._ask(
                "instances",
                ListInstances(name=name, version=version, node=node, cursor=cursor),
                InstanceList,
            )
            found += page.instances
            cursor = page.next_cursor
            if not cursor:
                return found

    # --- Changes ------------------------------------------------------------------------------

    async def update(
        self,
        name: str,
        version: str,
        *,
        drain_idle_s: float = 5.0,
        drain_timeout_s: float = 3600.0,
        failure_window_s: float | None = None,
        failure_threshold: float | None = None,
        failure_minimum: int | None = None,
    ) -> Governed:
        """Have new work go to another version; instances of the one before finish and leave.

        When too many instances of the new one fail, new work goes to the one before again.

        Args:
            name: the agent.
            version: a registered version; an earlier one to go back.
            drain_idle_s: an old instance leaves when nobody has used it for so long.
            drain_timeout_s: it leaves after so long in any case; 0 for no such end.
            failure_window_s: so long the new version is watched; None is the platform's own.
            failure_threshold: the share of ended instances that may have failed meanwhile.
            failure_minimum: judged only once so many have ended.

        Raises:
            DsecError: ``not_found``; ``invalid``.
        """
        (outcome,) = await self.update_many(
            [
                AgentUpdate(
                    name=name,
                    version=version,
                    drain_idle_s=drain_idle_s,
                    drain_timeout_s=drain_timeout_s,
                    failure_window_s=failure_window_s,
                    failure_threshold=failure_threshold,
                    failure_minimum=failure_minimum,
                )
            ]
        )
        if outcome.refusal is not None:
            raise DsecError(outcome.refusal.code, outcome.refusal.reason)
        assert outcome.governed is not None  # noqa: S101  one of the two is there
        return outcome.governed

    async def rollback(
        self, name: str, *, drain_idle_s: float = 5.0, drain_timeout_s: float = 3600.0
    ) -> Governed:
        """Have new work go back to the version before the last update; once more undoes that.

        Args:
            name: the agent.
            drain_idle_s: as :meth:`update` takes it.
            drain_timeout_s: likewise.

        Raises:
            DsecError: ``not_found``; ``conflict`` when there was no update, or it is taken back.
        """
        agent = await self.inspect(name)
        rollout = agent.rollout
        if rollout is None or agent.active != rollout.to_version:
            reason = rollout.reason if rollout is not None else "it was never updated"
            raise DsecError(
                ErrorCode.CONFLICT,
                f"{name} has no update to take back: {reason or 'it is taken back'}",
                details={"agent": name},
            )
        return await self.update(
            name,
            rollout.from_version,
            drain_idle_s=drain_idle_s,
            drain_timeout_s=drain_timeout_s,
        )

    async def update_many(self, updates: Iterable[AgentUpdate]) -> builtins.list[UpdateOutcome]:
        """Update several agents with one request, each for itself; return what came of each."""
        answer = await self._ask("update", UpdateAgents(updates=tuple(updates)), AgentsUpdated)
        return list(answer.outcomes)

    async def push_policy(
        self,
        name: str,
        policy: AgentPolicy | None = None,
        *,
        revoked: Iterable[str] = (),
        network: Policy | None = None,
        rate_limits: Mapping[str, float] | None = None,
        paused: bool = False,
        version: str = "",
        instances: Iterable[str] = (),
    ) -> Governed:
        """Put instances under a policy, in place of any earlier one.

        Args:
            name: the agent.
            policy: as a whole; or by what follows.
            revoked: permissions taken away.
            network: what instances may reach, as :func:`dsec.network.network_policy` takes it.
            rate_limits: requests a second, such as ``{"agent_socket": 10}``.
            paused: instances stand still until another policy is pushed.
            version: for instances of this version only.
            instances: for these sandboxes only.

        Raises:
            DsecError: ``not_found``; ``invalid``; ``unsupported`` for what nothing enforces.
        """
        meant = policy or AgentPolicy(
            revoked=tuple(revoked),
            network=None if network is None else network_policy(network),
            rate_limits=dict(rate_limits or {}),
            paused=paused,
        )
        requests = [
            PushPolicy(name=name, policy=meant, version=version, instances=part)
            for part in _parts(instances)
        ]
        return await self._governed("policy", requests)

    async def revoke(
        self,
        name: str,
        permissions: Iterable[str],
        *,
        version: str = "",
        instances: Iterable[str] = (),
    ) -> Governed:
        """Take permissions away, and leave the rest of each policy as it is.

        Raises:
            DsecError: as :meth:`push_policy`.
        """
        if isinstance(permissions, str):
            raise invalid("permissions is a list, not one text")
        taken = tuple(permissions)
        requests = [
            RevokePermission(name=name, permissions=taken, version=version, instances=part)
            for part in _parts(instances)
        ]
        return await self._governed("revoke", requests)

    async def _governed(self, verb: str, requests: builtins.list[Any]) -> Governed:
        answers = await asyncio.gather(*(self._ask(verb, one, Governed) for one in requests))
        if len(answers) == 1:
            return answers[0]
        named = {one.partition(".")[0] for request in requests for one in request.instances}
        silent = {node for answer in answers for node in answer.silent_nodes}
        last = max(answers, key=lambda answer: answer.revision)
        return msgspec.structs.replace(
            last,
            instances=sum(answer.instances for answer in answers),
            nodes=len(named - silent),
            silent_nodes=tuple(sorted(silent)),
            refused=tuple(one for answer in answers for one in answer.refused),
        )

    # --- State consistency --------------------------------------------------------------------

    async def report_dependencies(
        self, versions: Mapping[str, int] | None = None, *, forget: Iterable[str] = ()
    ) -> dict[str, int]:
        """Say how new what agents depend on is; return all that is known of the project's.

        Instances of agents whose contracts name one under ``depends_on`` and whose states are
        older then stand still until they are synchronised.

        Args:
            versions: by name: the Unix time in milliseconds of the last change. An older one than
                the known one changes nothing.
            forget: names that are nobody's dependencies any more.

        Raises:
            DsecError: ``invalid`` for a name, or a version from the future; ``exhausted`` for too
                many dependencies.
        """
        if isinstance(forget, str):
            raise invalid("forget is a list, not one text")
        report = ReportDependencies(versions=dict(versions or {}), forget=tuple(forget))
        return (await self._ask("report_dependencies", report, DependencyVersions)).versions

    async def dependencies(self) -> dict[str, int]:
        """Return the project's dependencies and their versions, in Unix milliseconds."""
        return (await self._ask("dependencies", ListDependencies(), DependencyVersions)).versions

    async def synchronise(
        self, name: str, instances: Iterable[str]
    ) -> builtins.list[InstanceState]:
        """Have instances that are behind synchronised now, those that failed at it too.

        Returns:
            The state of each afterwards; ``error`` says why it stands still all the same.

        Raises:
            DsecError: ``not_found``; ``invalid`` for none, more than 32, or an agent that depends
                on nothing; ``unavailable`` when a node cannot do it now.
        """
        if isinstance(instances, str):
            raise invalid("instances is a list, not one text")
        asked = SynchroniseInstances(name=name, instances=tuple(instances))
        timeout_s = SYNCHRONISE_TIMEOUT_S + 2 * _TIMEOUT_S
        answer = await self._ask("synchronise", asked, InstancesSynchronised, timeout_s)
        return list(answer.states)

    async def _ask(
        self,
        verb: str,
        message: Message,
        reply_type: type[ReplyT],
        timeout_s: float = _TIMEOUT_S,
    ) -> ReplyT:
        return await self._channel.ask(
            subjects.agent(self._channel.project, verb),
            message,
            reply_type,
            timeout_s=timeout_s,
            repeatable=True,
            patience_s=2 * ANSWER_PATIENCE_S,
        )


def _parts(instances: Iterable[str]) -> list[tuple[str, ...]]:
    """Return instances in as many parts as requests are needed; no two change one document."""
    if isinstance(instances, str):
        raise invalid("instances is a list, not one text")
    ordered = sorted(instances, key=shard_of)
    if not ordered:
        return [()]
    return [tuple(ordered[i : i + BATCH_MAX]) for i in range(0, len(ordered), BATCH_MAX)]


async def _bytes_of(package: bytes | str | Path | None) -> bytes:
    if package is None or isinstance(package, bytes):
        return package or b""
    try:
        return await asyncio.to_thread(Path(package).read_bytes)
    except OSError as error:
        raise invalid(f"the package {package} cannot be read: {error.strerror}") from None
