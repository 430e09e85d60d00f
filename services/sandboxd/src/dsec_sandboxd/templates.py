"""How another sandbox like one of this node is made, for who keeps checkpoints of it. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dsec_common.wire.network import NetworkMode, NetworkPolicy
from dsec_common.wire.sandbox import CreateSandbox
from dsec_sandboxd.records import SandboxRecord

if TYPE_CHECKING:
    from dsec_sandboxd.ports import SandboxNetworks


def template_of(record: SandboxRecord, networks: SandboxNetworks | None) -> CreateSandbox:
    """Return the request that makes a sandbox like this one, but for its files.

    Left out are its layers, which a snapshot knows; its first command and the files for that, which
    were run; its Compute Units, since a lease is of one sandbox; its key; and its variables, among
    which may be secrets: ``remade`` has the node take them from the snapshot.

    Args:
        record: the sandbox.
        networks: of the node, if it has any: what is in force there counts.
    """
    network, setup_network = networks.inherited(record.local) if networks else (None, None)
    return CreateSandbox(
        base="",
        limits=msgspec.structs.replace(record.limits, cu=0.0),
        labels=record.labels,
        agent=record.agent,
        agent_version=record.agent_version,
        rollout_id=record.rollout_id,
        model_rollout_id=record.model_rollout_id,
        ttl_s=record.ttl_s,
        idle_ttl_s=record.idle_ttl_s,
        idle_action=record.idle_action,
        deadline_s=record.deadline_s,
        network=_none_for_nothing(network),
        setup_network=_none_for_nothing(setup_network),
        cwd=record.defaults.cwd,
        user=record.defaults.user,
        tools=record.tools,
        action_terms=record.action_terms,
        remade=True,
    )


def _none_for_nothing(policy: NetworkPolicy | None) -> NetworkPolicy | None:
    return None if policy is None or policy.mode is NetworkMode.NONE else policy
