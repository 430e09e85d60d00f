"""Agents, between scheduler and node: the rules of instances, and which instances there are."""

from __future__ import annotations

import msgspec

from dsec_common.wire.agent import AgentPolicy, Refusal
from dsec_common.wire.base import Message


class AgentRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has to know of one agent. Two are merged by taking the higher revisions.

    Attributes:
        revision: of the last change told here.
        policies: by revision.
        versions: the revision of the policy of each version.
        pinned: the same for single instances, by local id.
        draining: the versions whose instances leave.
        drain_idle_s: how; see :class:`AgentUpdate`.
        drain_timeout_s: likewise.
    """

    project: str
    name: str
    revision: int
    policies: dict[int, AgentPolicy] = msgspec.field(default_factory=dict)
    versions: dict[str, int] = msgspec.field(default_factory=dict)
    pinned: dict[str, int] = msgspec.field(default_factory=dict)
    draining: tuple[str, ...] = ()
    drain_idle_s: float = 5.0
    drain_timeout_s: float = 0.0


class GovernNode(Message, frozen=True, kw_only=True):
    """Scheduler to node: put instances under these rules and say when they are in force."""

    rules: AgentRules


class NodeGoverned(Message, frozen=True, kw_only=True):
    """A node's answer: all its instances of the agent are under the rules, but the refused ones."""

    instances: int
    refused: tuple[Refusal, ...] = ()


class InstanceStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox began as an instance."""

    project: str
    local: str
    agent: str
    version: str
    started_at: float


class InstanceEnded(msgspec.Struct, frozen=True, kw_only=True):
    """An instance is over; ``failed`` says that it was not meant to end so."""

    project: str
    local: str
    failed: bool = False


class ReportInstances(Message, frozen=True, kw_only=True):
    """Node to scheduler: what began and ended since the last report that was answered.

    Attributes:
        complete: ``started`` are all instances of the node; whatever else is known of it is over.
        revisions: of the agents of its instances, by project and name.
    """

    node: str
    started: tuple[InstanceStarted, ...] = ()
    ended: tuple[InstanceEnded, ...] = ()
    complete: bool = False
    revisions: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


class InstancesReported(Message, frozen=True, kw_only=True):
    """The report is kept. ``rules`` are of agents of which the node knew less."""

    rules: tuple[AgentRules, ...] = ()
