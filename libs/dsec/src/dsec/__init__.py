"""The SDK of DSec: disposable sandboxes for agents, asked for over NATS.

``from dsec import DSecClient, Sandbox, BehaviorLog, DsecError, Limits``. Everything is loaded when
it is first used, so importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dsec.actions import Action
    from dsec.agent import Agent, ToolCall, ToolResult
    from dsec.agents import Agents
    from dsec.client import DSecClient
    from dsec.dags import Dags
    from dsec.layers import Layers
    from dsec.network import Network, PortStream, Tunnel
    from dsec.pools import FunctionResult, Pools
    from dsec.process import Process
    from dsec.results import CommandFailed, ExecResult
    from dsec.rollout_groups import Reply, RolloutGroup, Step
    from dsec.rollouts import Rollout, Stage
    from dsec.sandbox import Sandbox
    from dsec.session import Session
    from dsec.snapshots import Snapshot, Snapshots
    from dsec_common.behavior import BehaviorLog
    from dsec_common.compute.model import GpuDemand, ServiceClass
    from dsec_common.errors import DsecError, ErrorCode
    from dsec_common.wire.action import ActionInfo
    from dsec_common.wire.agent import AgentInfo, AgentPolicy, Governed
    from dsec_common.wire.dag import DagRun, DagSpec, DagStep
    from dsec_common.wire.layer import LayerInfo, LayerKind
    from dsec_common.wire.network import NetworkInfo, NetworkMode, NetworkPolicy, NetworkRule
    from dsec_common.wire.pool import CallStatus, PoolInfo
    from dsec_common.wire.sandbox import CpuClass, IdleAction, Limits, SandboxInfo, SandboxState
    from dsec_common.wire.snapshot import SnapshotInfo
    from dsec_common.wire.task import WarmUse

__version__: Final = "0.1.0"

__all__ = [
    "Action",
    "ActionInfo",
    "Agent",
    "AgentInfo",
    "AgentPolicy",
    "Agents",
    "BehaviorLog",
    "CallStatus",
    "CommandFailed",
    "CpuClass",
    "DSecClient",
    "DagRun",
    "DagSpec",
    "DagStep",
    "Dags",
    "DsecError",
    "ErrorCode",
    "ExecResult",
    "FunctionResult",
    "Governed",
    "GpuDemand",
    "IdleAction",
    "LayerInfo",
    "LayerKind",
    "Layers",
    "Limits",
    "Network",
    "NetworkInfo",
    "NetworkMode",
    "NetworkPolicy",
    "NetworkRule",
    "PoolInfo",
    "Pools",
    "PortStream",
    "Process",
    "Reply",
    "Rollout",
    "RolloutGroup",
    "Sandbox",
    "SandboxInfo",
    "SandboxState",
    "ServiceClass",
    "Session",
    "Snapshot",
    "SnapshotInfo",
    "Snapshots",
    "Stage",
    "Step",
    "ToolCall",
    "ToolResult",
    "Tunnel",
    "WarmUse",
    "__version__",
]

_HOME_OF: Final = {
    "Action": "dsec.actions",
    "ActionInfo": "dsec_common.wire.action",
    "Agent": "dsec.agent",
    "AgentInfo": "dsec_common.wire.agent",
    "AgentPolicy": "dsec_common.wire.agent",
    "Agents": "dsec.agents",
    "Governed": "dsec_common.wire.agent",
    "BehaviorLog": "dsec_common.behavior",
    "CallStatus": "dsec_common.wire.pool",
    "CommandFailed": "dsec.results",
    "CpuClass": "dsec_common.wire.sandbox",
    "DSecClient": "dsec.client",
    "DagRun": "dsec_common.wire.dag",
    "DagSpec": "dsec_common.wire.dag",
    "DagStep": "dsec_common.wire.dag",
    "Dags": "dsec.dags",
    "DsecError": "dsec_common.errors",
    "ErrorCode": "dsec_common.errors",
    "ExecResult": "dsec.results",
    "FunctionResult": "dsec.pools",
    "IdleAction": "dsec_common.wire.sandbox",
    "LayerInfo": "dsec_common.wire.layer",
    "LayerKind": "dsec_common.wire.layer",
    "Layers": "dsec.layers",
    "GpuDemand": "dsec_common.compute.model",
    "ServiceClass": "dsec_common.compute.model",
    "Limits": "dsec_common.wire.sandbox",
    "Network": "dsec.network",
    "NetworkInfo": "dsec_common.wire.network",
    "NetworkMode": "dsec_common.wire.network",
    "NetworkPolicy": "dsec_common.wire.network",
    "NetworkRule": "dsec_common.wire.network",
    "PoolInfo": "dsec_common.wire.pool",
    "Pools": "dsec.pools",
    "PortStream": "dsec.network",
    "Process": "dsec.process",
    "Reply": "dsec.rollout_groups",
    "Rollout": "dsec.rollouts",
    "RolloutGroup": "dsec.rollout_groups",
    "Sandbox": "dsec.sandbox",
    "SandboxInfo": "dsec_common.wire.sandbox",
    "Session": "dsec.session",
    "Snapshot": "dsec.snapshots",
    "SnapshotInfo": "dsec_common.wire.snapshot",
    "Snapshots": "dsec.snapshots",
    "SandboxState": "dsec_common.wire.sandbox",
    "Stage": "dsec.rollouts",
    "Step": "dsec.rollout_groups",
    "ToolCall": "dsec.agent",
    "ToolResult": "dsec.agent",
    "Tunnel": "dsec.network",
    "WarmUse": "dsec_common.wire.task",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        message = f"module 'dsec' has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
