"""What a node remembers of one sandbox: the value in its StateDB and in its core."""

from __future__ import annotations

import msgspec

from dsec_common.subjects import ScopedId
from dsec_common.wire.sandbox import (
    EndCause,
    Limits,
    SandboxCreated,
    SandboxEnded,
    SandboxInfo,
    SandboxState,
)


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
        expires_at: Unix seconds at which the node ends it; 0 means never.
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
    expires_at: float = 0.0
    ended_at: float = 0.0
    end_cause: EndCause | None = None
    end_detail: str = ""
    create_ms: float = 0.0

    def scoped_id(self, node: str) -> ScopedId:
        """Return the id that callers know."""
        return ScopedId(node, self.local)

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
            rollout_id=self.rollout_id,
            expires_at=self.expires_at,
            ended_at=self.ended_at,
            end_cause=self.end_cause,
            end_detail=self.end_detail,
        )
