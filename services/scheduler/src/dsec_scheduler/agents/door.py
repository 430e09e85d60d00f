"""The verbs of agents: ``dsec.v1.<project>.agent.<verb>``."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from dsec_common.bus_types import Request
from dsec_common.clock import Clock
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import ScopedId
from dsec_common.wire.agent import (
    BATCH_MAX,
    AgentInfo,
    AgentList,
    AgentRemoved,
    AgentsUpdated,
    AgentUpdate,
    AgentVersionInfo,
    Governed,
    InspectAgent,
    InstanceInfo,
    InstanceList,
    ListAgents,
    ListInstances,
    PackagePieceKept,
    PushPolicy,
    Refusal,
    RegisterAgent,
    RemoveAgent,
    RevokePermission,
    RolloutInfo,
    UpdateAgents,
    UpdateOutcome,
    UploadPackage,
    validate_name,
)
from dsec_scheduler.agents import changes, shards
from dsec_scheduler.agents.governor import Governor
from dsec_scheduler.agents.packages import Packages
from dsec_scheduler.agents.records import AgentRecord, RolloutRecord, ShardRecord
from dsec_scheduler.agents.registry import Registry, written
from dsec_scheduler.config import SchedulerConfig

_PAGE_MAX: Final = 1000
_INSTANCES_PAGE_MAX: Final = 5000
_UPDATES_MAX: Final = 100
_REFUSED_SHOWN_MAX: Final = 100


class AgentDoor:
    """Answers what projects ask about their agents. A project's own are all it can name."""

    def __init__(
        self,
        registry: Registry,
        governor: Governor,
        packages: Packages,
        clock: Clock,
        config: SchedulerConfig,
    ) -> None:
        self._registry = registry
        self._governor = governor
        self._packages = packages
        self._clock = clock
        self._config = config

    # --- Versions -----------------------------------------------------------------------------

    async def upload(self, asked: Request[UploadPackage]) -> PackagePieceKept:
        """Keep a piece of a package.

        Raises:
            DsecError: ``invalid``; ``exhausted`` when the storage is full, or what the project may
                have of it.
        """

        async def registered() -> set[str]:
            records = await self._registry.of_project(asked.project)
            return {one.package_sha256 for record in records for one in record.versions.values()}

        return await self._packages.keep(asked.project, asked.message, registered)

    async def register(self, asked: Request[RegisterAgent]) -> AgentInfo:
        """Register a version; on return it can be used by every scheduler that reads it.

        Raises:
            DsecError: ``invalid``, for its contract with every problem of that; ``unsupported`` for
                its policy; ``conflict`` when it is registered with something else; ``not_found``
                for a package that was not uploaded; ``exhausted`` for too many versions, or agents
                of the project. What is refused keeps nothing.
        """
        project = asked.project
        validate_name(asked.message.name)
        # A large contract takes a moment, and others are served meanwhile.
        request, terms = await asyncio.to_thread(changes.as_contracted, asked.message)
        if request.package_sha256:
            await self._packages.check(project, request.package_sha256, request.package_bytes)
        contract = written(request.contract)

        def change(before: AgentRecord | None) -> AgentRecord:
            now = self._clock.now()
            return changes.registered(before, project, request, contract.sha256, now, terms=terms)

        known = await self._registry.find(project, request.name)
        change(known)
        if known is None:
            await self._check_room(project)
        # Before the version that names it, and after all that it may be refused for.
        await self._registry.keep_contract(project, request.name, contract)
        record = await self._registry.change(project, request.name, change)
        return _info(record, request.message_id, self._clock.now())

    async def _check_room(self, project: str) -> None:
        most = self._config.agents_project_max
        if len(await self._registry.of_project(project)) >= most:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the project {project} has {most} agents, which is the most "
                "(agents_project_max); remove agents that nothing uses",
                retryable=False,
                details={"limit": most},
            )

    async def list_agents(self, asked: Request[ListAgents]) -> AgentList:
        """Return a page of the project's agents, by name.

        Raises:
            DsecError: ``invalid`` for an impossible page.
        """
        request = asked.message
        limit = _checked_limit(request.limit, _PAGE_MAX)
        found = [
            record
            for record in await self._registry.of_project(asked.project)
            if record.name.startswith(request.prefix)
            and record.name > request.after
            and _has_permission(record, request.permission)
        ]
        return AgentList(
            cause_id=request.message_id,
            agents=tuple(
                _info(record, request.message_id, self._clock.now()) for record in found[:limit]
            ),
            more=len(found) > limit,
        )

    async def inspect(self, asked: Request[InspectAgent]) -> AgentInfo:
        """Return an agent with its contracts, its policies, and how many instances there are.

        Raises:
            DsecError: ``not_found``.
        """
        name, project = asked.message.name, asked.project
        record = await self._registry.read(project, validate_name(name))
        documents = list((await self._registry.shards(project)).values())
        counts: dict[str, int] = {}
        for _, one in shards.instances_of(documents, name):
            counts[one.version] = counts.get(one.version, 0) + 1
        info = _info(record, asked.message.message_id, self._clock.now())
        versions = []
        for version in info.versions:
            outcome = shards.outcome_of(documents, name, version.version)
            digest = record.versions[version.version].contract_sha256
            versions.append(
                msgspec.structs.replace(
                    version,
                    instances=counts.get(version.version, 0),
                    finished=outcome.finished,
                    failed=outcome.failed,
                    contract=await self._registry.contract(project, name, digest),
                )
            )
        return msgspec.structs.replace(info, versions=tuple(versions))

    async def instances(self, asked: Request[ListInstances]) -> InstanceList:
        """Return a page of an agent's instances; pages end with whole documents.

        Raises:
            DsecError: ``not_found``; ``invalid`` for an impossible page.
        """
        request = asked.message
        limit = _checked_limit(request.limit, _INSTANCES_PAGE_MAX)
        record = await self._registry.read(asked.project, validate_name(request.name))
        version = _chosen(record, request.version)
        documents = await self._registry.shards(asked.project)
        found: list[InstanceInfo] = []
        for shard in sorted(documents):
            if shard < request.cursor:
                continue
            if len(found) >= limit:
                return InstanceList(
                    cause_id=request.message_id, instances=tuple(found), next_cursor=shard
                )
            found += [
                InstanceInfo(
                    sandbox_id=sandbox_id,
                    version=one.version,
                    started_at=one.started_at,
                    policy_revision=shards.revision_for(record, one),
                )
                for sandbox_id, one in shards.instances_of([documents[shard]], request.name)
                if version in {"", one.version} and request.node in {"", shards.node_of(sandbox_id)}
            ]
        return InstanceList(cause_id=request.message_id, instances=tuple(found))

    async def remove(self, asked: Request[RemoveAgent]) -> AgentRemoved:
        """Remove a version, or an agent; on return no scheduler gives it work.

        Its packages go, too, unless another version has them. Should that not be possible now, they
        are left behind: the version is gone all the same.

        Raises:
            DsecError: ``not_found``; ``conflict`` for what is in use.
        """
        request, project = asked.message, asked.project
        before = await self._registry.read(project, validate_name(request.name))
        documents = (await self._registry.shards(project)).values()
        counts = Counter(one.version for _, one in shards.instances_of(documents, request.name))
        after = await self._registry.change(
            project,
            request.name,
            lambda kept: changes.removed(
                kept or before, request.version, counts, self._clock.now()
            ),
        )
        gone = [one for name, one in before.versions.items() if name not in after.versions]
        packages = {(one.package_sha256, one.package_bytes) for one in gone if one.package_sha256}
        for record in await self._registry.of_project(project) if packages else ():
            packages -= {
                (one.package_sha256, one.package_bytes) for one in record.versions.values()
            }
        for sha256, size in sorted(packages):
            with contextlib.suppress(DsecError):
                await self._packages.remove(project, sha256, size)
        return AgentRemoved(
            cause_id=request.message_id,
            name=request.name,
            versions=tuple(one.version for one in gone),
        )

    # --- Updates ------------------------------------------------------------------------------

    async def update(self, asked: Request[UpdateAgents]) -> AgentsUpdated:
        """Have agents' new work go to other versions; each for itself.

        Raises:
            DsecError: ``invalid`` for no updates, or too many.
        """
        updates = asked.message.updates
        if not 1 <= len(updates) <= _UPDATES_MAX:
            raise invalid(f"{len(updates)} updates: use 1 to {_UPDATES_MAX}", field="updates")
        outcomes = [await self._update(asked.project, update) for update in updates]
        return AgentsUpdated(cause_id=asked.message.message_id, outcomes=tuple(outcomes))

    async def _update(self, project: str, given: AgentUpdate) -> UpdateOutcome:
        config = self._config
        update = msgspec.structs.replace(
            given,
            failure_window_s=_given_or(given.failure_window_s, config.rollout_window_s),
            failure_threshold=_given_or(given.failure_threshold, config.rollout_threshold),
            failure_minimum=given.failure_minimum or config.rollout_minimum,
        )
        try:
            record = await self._registry.read(project, validate_name(update.name))
            version = changes.find(record, update.version).version
            update = msgspec.structs.replace(update, version=version)
            documents = await self._registry.shards(project)
            before = shards.outcome_of(documents.values(), update.name, update.version)
            record = await self._registry.change(
                project,
                update.name,
                lambda kept: changes.updated(kept or record, update, before, self._clock.now()),
            )
            governed = await self._governor.tell(record, documents=documents.values())
            return UpdateOutcome(name=update.name, governed=governed)
        except DsecError as error:
            refusal = Refusal(what=update.name[:64], code=error.code, reason=error.message)
            return UpdateOutcome(name=update.name[:64], refusal=refusal)

    # --- Policies -----------------------------------------------------------------------------

    async def policy(self, asked: Request[PushPolicy]) -> Governed:
        """Put instances under a policy; on return it is durable and in force.

        Raises:
            DsecError: ``not_found``; ``invalid``; ``unsupported`` for what nothing enforces;
                ``exhausted`` for too many policies.
        """
        request, project = asked.message, asked.project
        chosen = _checked(request.instances)
        record = await self._registry.read(project, validate_name(request.name))
        version = _chosen(record, request.version)
        record = await self._registry.change(
            project,
            request.name,
            lambda kept: changes.pushed(
                kept or record, request.policy, version, single=bool(chosen)
            ),
        )
        if not chosen:
            return await self._governor.tell(record)
        return await self._told_singly(record, dict.fromkeys(chosen, record.revision))

    async def revoke(self, asked: Request[RevokePermission]) -> Governed:
        """Take permissions from instances; on return it is durable and in force.

        Raises:
            DsecError: as :meth:`policy`.
        """
        request, project = asked.message, asked.project
        chosen = set(_checked(request.instances))
        record = await self._registry.read(project, validate_name(request.name))
        version = _chosen(record, request.version)
        documents = (await self._registry.shards(project)).values()
        pins: dict[str, int] = {}

        def change(kept: AgentRecord | None) -> AgentRecord:
            current = kept or record
            under = _under(current, documents, version, chosen)
            changed, successors = changes.revoked(
                current,
                request.permissions,
                version,
                under.values(),
                single=bool(chosen),
            )
            pins.clear()
            pins.update({one: successors[revision] for one, revision in under.items()})
            return changed

        record = await self._registry.change(project, request.name, change)
        if chosen:
            unknown = dict.fromkeys(chosen - pins.keys(), 0)
            return await self._told_singly(record, pins | unknown)
        kept, _ = await self._governor.pin(record, pins)
        return await self._governor.tell(record, kept, documents=documents)

    async def _told_singly(self, record: AgentRecord, pins: Mapping[str, int]) -> Governed:
        kept, unknown = await self._governor.pin(record, pins)
        governed = await self._governor.tell(record, kept, single=True)
        refused = (*governed.refused, *unknown)[:_REFUSED_SHOWN_MAX]
        return msgspec.structs.replace(governed, refused=refused)


def _chosen(record: AgentRecord, version: str) -> str:
    """Return the version that is meant, by its number; empty for all."""
    return changes.find(record, version).version if version else ""


def _under(
    record: AgentRecord, documents: Iterable[ShardRecord], version: str, chosen: set[str]
) -> dict[str, int]:
    """Return the revisions that instances are under: chosen ones, or those with their own."""
    found: dict[str, int] = {}
    for sandbox_id, one in shards.instances_of(documents, record.name):
        revision = shards.revision_for(record, one)
        own = one.policy and one.policy == revision
        if version in {"", one.version} and (sandbox_id in chosen if chosen else own):
            found[sandbox_id] = revision
    return found


def _checked(instances: tuple[str, ...]) -> tuple[str, ...]:
    if len(instances) > BATCH_MAX:
        raise invalid(
            f"{len(instances)} instances in one request: name at most {BATCH_MAX}, or a version, "
            "or none for all",
            field="instances",
        )
    for sandbox_id in instances:
        ScopedId.parse(sandbox_id)
    return instances


def _checked_limit(limit: int, most: int) -> int:
    if not 1 <= limit <= most:
        raise DsecError(ErrorCode.INVALID, f"limit is {limit}: use 1 to {most}")
    return limit


def _given_or(given: float | None, configured: float) -> float:
    return configured if given is None else given


def _has_permission(record: AgentRecord, permission: str) -> bool:
    return not permission or any(
        permission in version.permissions for version in record.versions.values()
    )


def _info(record: AgentRecord, cause_id: str, now: float) -> AgentInfo:
    return AgentInfo(
        cause_id=cause_id,
        name=record.name,
        description=record.description,
        active=record.active,
        revision=record.revision,
        versions=tuple(
            AgentVersionInfo(
                version=one.version,
                state=one.state,
                registered_at=one.registered_at,
                permissions=one.permissions,
                base=one.base,
                workspace=one.workspace,
                toolkits=one.toolkits,
                package_sha256=one.package_sha256,
                package_bytes=one.package_bytes,
                policy_revision=one.policy,
                policy=record.policies.get(one.policy),
            )
            for one in record.versions.values()
        ),
        rollout=None if record.rollout is None else _rollout(record.rollout, now),
    )


def _rollout(rollout: RolloutRecord, now: float) -> RolloutInfo:
    over = rollout.state == "watching" and now >= rollout.began_at + rollout.window_s
    return RolloutInfo(
        from_version=rollout.from_version,
        to_version=rollout.to_version,
        began_at=rollout.began_at,
        state="settled" if over else rollout.state,
        reason=rollout.reason,
    )
