"""What a request that names an agent means: its version, its layers, its node's rules."""

from __future__ import annotations

import msgspec

from dsec_common.asdl.terms import under
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.agent_node import AgentRules
from dsec_common.wire.sandbox import CreateSandbox
from dsec_scheduler.agents import changes
from dsec_scheduler.agents.records import AgentRecord
from dsec_scheduler.agents.registry import Registry


class Resolver:
    """Finds agents of requests, in memory: a request that names no agent costs nothing here.

    What a request leaves open is as its agent's version and the contract of that have it.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def learn(self, project: str, request: CreateSandbox) -> CreateSandbox:
        """Return the request as it would be placed now, for checking; it may have to be looked up.

        Raises:
            DsecError: ``not_found`` for an agent or a version that is not registered; ``conflict``
                for a version whose instances leave; ``denied`` for more than its contract allows.
        """
        if request.agent_version and self._registry.known(project, request.agent) is None:
            # Another scheduler may have registered it a moment ago.
            await self._registry.read(project, request.agent)
        return self.placed(project, request)

    def placed(self, project: str, request: CreateSandbox) -> CreateSandbox:
        """Return the request with its agent's version and layers.

        Raises:
            DsecError: as :meth:`learn`.
        """
        record = self._registry.known(project, request.agent) if request.agent else None
        if record is not None:
            return _as_version(record, request)
        if request.agent_version:
            raise changes.no_agent(request.agent)
        return request

    def wants_units(self, project: str, request: CreateSandbox) -> bool:
        """Return whether it asks for Compute Units, or its agent's contract does."""
        if request.gpu_demand is not None or not request.agent:
            return request.gpu_demand is not None
        record = self._registry.known(project, request.agent)
        version = record and record.versions.get(request.agent_version or record.active)
        return bool(version and version.terms and version.terms.gpu)

    def rules(self, project: str, request: CreateSandbox) -> AgentRules | None:
        """Return what the node of an instance has to know; None for a sandbox that is none."""
        if not request.agent_version:
            return None
        record = self._registry.known(project, request.agent)
        return None if record is None else changes.rules_of(record)


def _as_version(record: AgentRecord, request: CreateSandbox) -> CreateSandbox:
    version = changes.find(record, request.agent_version or record.active)
    if not changes.takes_work(record, version.version):
        raise DsecError(
            ErrorCode.CONFLICT,
            f"{record.name} {version.version} takes no new work ({version.state.value}); "
            f"{record.active} does",
            details={"agent": record.name, "active": record.active},
        )
    own = not request.base and not request.snapshot
    is_whole = request.remade or bool(request.snapshot)
    meant = msgspec.structs.replace(
        request,
        agent_version=version.version,
        base=version.base if own else request.base,
        workspace=version.workspace if own and not request.workspace else request.workspace,
        toolkits=request.toolkits if is_whole else (*request.toolkits, *version.toolkits),
    )
    if version.terms is None:
        return meant
    return under(version.terms, meant, f"{record.name} {version.version}")
