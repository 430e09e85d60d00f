"""The requests about what a sandbox may reach, and what the configuration says of it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsec_common.bus_types import Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.network_policy import RULE_SETS
from dsec_common.wire.network import (
    EnterAgentPhase,
    InspectNetwork,
    NetworkInfo,
    NetworkPolicy,
    SetNetwork,
)
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.lifecycle import local_of
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.network.settings import NetworkSettings
from dsec_sandboxd.network.upstreams import Upstream, upstreams_of_host
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.step_log import StepLog

_HOSTS_RESOLV_CONF: Final = Path("/etc/resolv.conf")


class NetworkDoor:
    """The network verbs of this node's sandboxes."""

    def __init__(self, state: NodeState, networks: Networks, steps: StepLog) -> None:
        self._state = state
        self._networks = networks
        self._steps = steps

    async def inspect(self, request: Request[InspectNetwork]) -> NetworkInfo:
        """Return the policy in force, the sandbox's addresses, and how much was refused."""
        return self._answer(request, await self._networks.info(self._record(request)))

    async def set(self, request: Request[SetNetwork]) -> NetworkInfo:
        """Put a sandbox under another policy; on return it is in force.

        Raises:
            DsecError: ``invalid``, ``unsupported``; ``denied`` when its agent's policy says what
                it may reach; then the policy before stays in force.
        """
        record = self._record(request)
        policy = request.message.policy
        if self._networks.governed(record) is not None:
            raise DsecError(
                ErrorCode.DENIED,
                f"the policy of agent {record.agent} says what its instances may reach; push "
                "another one to change that",
                details={"agent": record.agent},
            )
        info = await self._networks.set_policy(record, policy)
        self._log(record, "set_network", info)
        return self._answer(request, info)

    async def enter_agent_phase(self, request: Request[EnterAgentPhase]) -> NetworkInfo:
        """Put a sandbox under the policy for its agent, for good; again is fine."""
        record = self._record(request)
        info = await self._networks.enter_agent_phase(record)
        self._log(record, "enter_agent_phase", info)
        return self._answer(request, info)

    def _record(
        self,
        request: Request[InspectNetwork] | Request[SetNetwork] | Request[EnterAgentPhase],
    ) -> SandboxRecord:
        return self._state.running(request.project, local_of(request))

    def _answer(
        self,
        request: Request[InspectNetwork] | Request[SetNetwork] | Request[EnterAgentPhase],
        info: NetworkInfo,
    ) -> NetworkInfo:
        return msgspec.structs.replace(
            info,
            sandbox_id=f"{self._state.rules.node}.{info.sandbox_id}",
            cause_id=request.message.message_id,
        )

    def _log(self, record: SandboxRecord, action: str, info: NetworkInfo) -> None:
        self._steps.step(
            record,
            action,
            attributes={"phase": info.phase.value, **_told(info.policy)},
        )


def _told(policy: NetworkPolicy) -> dict[str, str]:
    """Return the attributes that say what a policy is."""
    return {
        "mode": policy.mode.value,
        "rules": str(len(policy.allow) + len(policy.deny)),
        "rule_sets": " ".join(name for name, wanted in policy.rule_sets.items() if wanted),
    }


class DenialSteps:
    """Writes samples of what sandboxes were refused into the behaviour log."""

    def __init__(self, steps: StepLog) -> None:
        self._steps = steps

    def __call__(self, record: SandboxRecord, attributes: Mapping[str, str]) -> None:
        """Write one; the kernel lets through about one a second and sandbox."""
        self._steps.step(record, "network_denied", status="denied", attributes=attributes)


def settings_of(config: SandboxdConfig) -> NetworkSettings:
    """Return the network part of the configuration, which was checked when it was read."""
    rule_sets = {**RULE_SETS, **{name: tuple(r) for name, r in config.network_rule_sets.items()}}
    return NetworkSettings(
        uplink=config.network_uplink,
        upstreams=tuple(map(Upstream.parse, config.network_resolvers)) or _upstreams_of_host(),
        denied=tuple(ipaddress.ip_network(text, strict=False) for text in config.network_deny),
        rule_sets=rule_sets,
        connections_max=config.network_connections_max,
    )


def _upstreams_of_host() -> tuple[Upstream, ...]:
    try:
        return upstreams_of_host(_HOSTS_RESOLV_CONF.read_text())
    except OSError:
        return ()
