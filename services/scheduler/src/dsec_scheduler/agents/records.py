"""What the registry keeps: a document for each agent, and hashed documents for all instances."""

from __future__ import annotations

import msgspec

from dsec_common.asdl.terms import Terms
from dsec_common.wire.agent import AgentPolicy, AgentVersion
from dsec_common.wire.base import Message


class VersionRecord(AgentVersion, frozen=True, kw_only=True, omit_defaults=True):
    """A version, as the registry keeps it.

    Attributes:
        contract_sha256: of its contract, which is kept beside the agent's document.
        policy: the revision of the policy of its instances; 0 for none.
        terms: what of its contract requests for instances are brought under; None without one.
    """

    contract_sha256: str = ""
    policy: int = 0
    terms: Terms | None = None


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last update, and what its new version is judged by.

    Attributes:
        finished_before: instances of the new version that had ended when the update began.
        failed_before: those of them that had failed.
        state: ``watching``, ``settled`` or ``rolled_back``.
    """

    from_version: str
    to_version: str
    began_at: float
    window_s: float
    threshold: float
    minimum: int
    finished_before: int = 0
    failed_before: int = 0
    state: str = "watching"
    reason: str = ""


class AgentRecord(Message, frozen=True, kw_only=True):
    """An agent. Its ``message_id`` is that of the write: who lost the answer knows it again.

    Attributes:
        revision: of the last change that nodes have to know of.
        policy: the revision of the policy that versions registered later begin with.
        policies: by revision, those that a version or an instance is under.
    """

    project: str
    name: str
    description: str = ""
    active: str = ""
    revision: int = 0
    policy: int = 0
    policies: dict[int, AgentPolicy] = msgspec.field(default_factory=dict)
    versions: dict[str, VersionRecord] = msgspec.field(default_factory=dict)
    drain_idle_s: float = 5.0
    drain_timeout_s: float = 0.0
    rollout: RolloutRecord | None = None


class ContractRecord(Message, frozen=True, kw_only=True):
    """What an author wrote, as JSON."""

    contract: bytes


class InstanceRecord(msgspec.Struct, frozen=True, array_like=True):
    """One instance; short, since a document holds hundreds.

    Attributes:
        policy: the revision of its own policy; 0 when only its version has one.
    """

    agent: str
    version: str
    started_at: float
    policy: int = 0


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How many instances of a version have ended, and how many of them by failing."""

    finished: int = 0
    failed: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        """Return both together."""
        return Outcome(self.finished + other.finished, self.failed + other.failed)


class ShardRecord(Message, frozen=True, kw_only=True):
    """One of a project's hashed documents.

    An instance leaves and its end is counted by one write, so no end is counted twice.

    Attributes:
        instances: by sandbox id.
        outcomes: by agent and version.
    """

    instances: dict[str, InstanceRecord] = msgspec.field(default_factory=dict)
    outcomes: dict[str, dict[str, Outcome]] = msgspec.field(default_factory=dict)
