"""What a node remembers of one sandbox: the value in its StateDB and in its core."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dsec_common.compute.model import Slice
from dsec_common.subjects import ScopedId
from dsec_common.wire.action import ActionTerms
from dsec_common.wire.layer import CommandDefaults
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.sandbox import (
    EndCause,
    IdleAction,
    Limits,
    SandboxCreated,
    SandboxEnded,
    SandboxInfo,
    SandboxState,
)
from dsec_common.wire.task import WarmUse
from dsec_common.wire.tools import NodeTools
from dsec_sandboxd import gpu_slices
from dsec_sandboxd.kernel.interface import SandboxIdentity


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sandbox of this node, from the intent to create it until its record is dropped.

    Attributes:
        local: the sandbox's id on the node.
        project: who owns it; requests of any other project do not see it.
        placement_id: the message that placed it; the same message again is the same placement.
        request_id: the caller's create request.
        state: where it is in its life.
        created_at: Unix seconds; of the intent first, of the running sandbox then.
        layer_references: as the caller named them, lowest first.
        layer_digests: what they resolved to.
        limits: the limits in force.
        env: variables of every command; empty once the sandbox has ended.
        ttl_s: its time to live, from the moment it runs or is touched; 0 means no end.
        expires_at: Unix seconds at which the node ends it, if the clock does not jump; 0 means
            never, or not known before it runs.
        deadline_s: so long after it began to run it ends, whoever touches it; 0 means never.
        idle_ttl_s: after so long without use ``idle_action`` is taken; 0 means never.
        paused_at: Unix seconds since which it stands still, or 0.
        paused_s: how long it has stood still in all before that.
        pause_reason: why: ``asked``, ``idle``, or the reason that was given.
        delete_after: it goes when its first command has ended.
        network: what was asked for at its creation; what is in force is kept with the network.
        has_command: it was created with a first command.
        snapshot: the snapshot that it was made from, last put back to or last taken of, or empty.
        snapshot_layers: what it has mounted between its layers and its writable one, lowest first.
        inheriting: it was put back to a snapshot and has its new identity, but perhaps not all
            that was the old one's yet.
        put_back_by: the message that last had it put back: the same again does nothing.
        warm: whether it may be, or has to be, one that was made ahead of need.
        asked_as: the id that the scheduler meant it to have, if it is one that was made ahead of
            need: that has an id of its own, and is found by both.
        defaults: what its base's image says of commands, with the directory and the user that were
            asked for instead; its variables are among ``env``, too.
        lease_resizes: how often its lease has got other slices, as far as is known here.
        agent_version: which version of its registered agent it is an instance of; empty for none.
        model_rollout_id: the rollout that its model calls go to; empty for no model endpoint.
        tools: the tools of its agent that the node runs.
        action_terms: what its agent's contract allows its actions.
        identity: by what a later daemon recognises it in the kernel; none before it runs.
    """

    local: str
    project: str
    placement_id: str
    request_id: str
    state: SandboxState
    created_at: float
    layer_references: tuple[str, ...]
    layer_digests: tuple[str, ...]
    limits: Limits
    env: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    rollout_id: str = ""
    lease_id: str = ""
    slices: tuple[Slice, ...] = ()
    lease_resizes: int = 0
    ttl_s: float = 0.0
    expires_at: float = 0.0
    deadline_s: float = 0.0
    idle_ttl_s: float = 0.0
    idle_action: IdleAction = IdleAction.END
    paused_at: float = 0.0
    paused_s: float = 0.0
    pause_reason: str = ""
    delete_after: bool = False
    has_command: bool = False
    network: NetworkPolicy | None = None
    setup_network: NetworkPolicy | None = None
    ended_at: float = 0.0
    end_cause: EndCause | None = None
    end_detail: str = ""
    create_ms: float = 0.0
    identity: SandboxIdentity | None = None
    agent_version: str = ""
    snapshot: str = ""
    snapshot_layers: tuple[str, ...] = ()
    inheriting: bool = False
    put_back_by: str = ""
    warm: WarmUse = WarmUse.PREFER
    asked_as: str = ""
    model_rollout_id: str = ""
    tools: NodeTools | None = None
    action_terms: ActionTerms | None = None
    defaults: CommandDefaults = msgspec.field(default_factory=CommandDefaults)

    def env_for(self, named: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of a command that names some: over its own go those of its GPUs."""
        if not named and not self.slices:
            return self.env
        return {**self.env, **named, **gpu_slices.environment(self.slices)}

    def cwd_for(self, named: str) -> str:
        """Return the working directory of a command: that which it names, or the sandbox's own."""
        return named or self.defaults.cwd or "/"

    def user_for(self, named: str) -> str:
        """Return the user of a command: that which it names, or the sandbox's own."""
        return named or self.defaults.user or "root"

    def scoped_id(self, node: str) -> ScopedId:
        """Return the id that callers know."""
        return ScopedId(node, self.local)

    def stood_still_s(self, now: float) -> float:
        """Return how long it has stood still in all, by the wall clock that reads ``now``."""
        return self.paused_s + (max(now - self.paused_at, 0.0) if self.paused_at else 0.0)

    def expires_with(self, ttl_s: float, now: float, began_at: float) -> float:
        """Return when it ends if a time to live begins at ``now``; 0 is never. In Unix seconds."""
        ends = [now + ttl_s] if ttl_s else []
        if self.deadline_s:
            ends.append(began_at + self.deadline_s)
        return min(ends, default=0.0)

    def created(self, node: str) -> SandboxCreated:
        """Return the answer to the create request."""
        return SandboxCreated(
            cause_id=self.request_id,
            sandbox_id=f"{node}.{self.local}",
            node=node,
            created_at=self.created_at,
            layers=self.layer_references,
            limits=self.limits,
            lease_id=self.lease_id,
            create_ms=self.create_ms,
            warm=bool(self.asked_as),
        )

    def ended(self, node: str) -> SandboxEnded:
        """Return the event of its end. Its id is fixed, so that a repetition is recognised."""
        return SandboxEnded(
            message_id=f"{self.placement_id}-ended",
            cause_id=self.request_id,
            sandbox_id=f"{node}.{self.local}",
            cause=self.end_cause or EndCause.DELETED,
            detail=self.end_detail,
        )

    def info(self, node: str) -> SandboxInfo:
        """Return what an inspection shows, without what the kernel measures."""
        return SandboxInfo(
            sandbox_id=f"{node}.{self.local}",
            project=self.project,
            state=self.state,
            created_at=self.created_at,
            layers=self.layer_references,
            limits=self.limits,
            labels=self.labels,
            agent=self.agent,
            agent_version=self.agent_version,
            rollout_id=self.rollout_id,
            ttl_s=self.ttl_s,
            expires_at=self.expires_at,
            idle_ttl_s=self.idle_ttl_s,
            idle_action=self.idle_action,
            paused_at=self.paused_at,
            ended_at=self.ended_at,
            end_cause=self.end_cause,
            end_detail=self.end_detail,
            snapshot=f"{node}.{self.snapshot}" if self.snapshot else "",
        )
