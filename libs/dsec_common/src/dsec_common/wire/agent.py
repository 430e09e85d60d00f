"""The agent registry: versions of agents, their instances, and what they may do.

An *agent* is a name with versions; a version never changes once it is registered. An *instance* is
a sandbox that was created for a version. A *policy* says what instances may do; every change of an
agent has a number, its *revision*, and of two policies that reach an instance that with the higher
revision holds. So changes may be told twice, late, or out of order, and all nodes agree in the end.
"""

from __future__ import annotations

import re
import zlib
from enum import StrEnum
from typing import Any, Final

import msgspec

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.network_policy import RULE_SETS, compile_policy
from dsec_common.wire.base import Message
from dsec_common.wire.network import NetworkPolicy

ACTIVE: Final = "active"
"""In place of a version: the one that new work goes to. The agent has to be registered."""

NETWORK_ACCESS: Final = "network_access"
"""The permission without which an instance reaches nothing but its own loopback."""

AGENT_SOCKET: Final = "agent_socket"
"""The rate limit of what an instance asks over its agent socket, in requests a second."""

ENFORCED_PERMISSIONS: Final = frozenset({NETWORK_ACCESS})
"""What nodes can take away from an instance. A policy that names another is refused."""

ENFORCED_RATES: Final = frozenset({AGENT_SOCKET})
"""What nodes can limit the rate of. A policy that names another is refused."""

CONTRACT_MAX_BYTES: Final = 64 * 1024
"""The most that a version's contract may take, as JSON."""

PACKAGE_MAX_BYTES: Final = 50 * 1024 * 1024
"""The largest package."""

PACKAGE_CHUNK_BYTES: Final = 512 * 1024
"""The most of a package that one message carries."""

SHARDS: Final = 256
"""Into so many documents a project's instances are hashed."""

BATCH_MAX: Final = 20_000
"""The most instances that one request may name."""

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62})")
_VERSION: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+-]{0,62})")


def validate_name(name: str) -> str:
    """Return an agent's name unchanged, or raise ``invalid``."""
    if not _NAME.fullmatch(name):
        raise invalid(
            f"{name[:64]!r} is not an agent's name: use 1-63 lower-case letters, digits, '_' and "
            "'-'",
            field="name",
        )
    return name


def validate_version(version: str) -> str:
    """Return a version unchanged, or raise ``invalid``."""
    if not _VERSION.fullmatch(version) or version == ACTIVE:
        raise invalid(
            f"{version[:64]!r} is not a version: use 1-63 letters, digits and '._+-', such as 1.0; "
            f"{ACTIVE!r} means the one that new work goes to",
            field="version",
        )
    return version


def shard_of(sandbox_id: str) -> str:
    """Return which of the :data:`SHARDS` documents an instance is in, as two hexadecimal digits.

    Whoever names many instances in several requests sorts them by it: then each request changes few
    documents, and no two the same.
    """
    return f"{zlib.crc32(sandbox_id.encode()) % SHARDS:02x}"


class AgentPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What instances may do, whatever their owners ask for. A reader that knows less refuses it.

    Attributes:
        revoked: permissions taken away, of :data:`ENFORCED_PERMISSIONS`. Goes before all else.
        network: what instances may reach, in place of what they were created with; None leaves
            that to them.
        rate_limits: requests a second of an instance by what is limited, of
            :data:`ENFORCED_RATES`.
        paused: instances stand still, and no request wakes them.
    """

    revoked: tuple[str, ...] = ()
    network: NetworkPolicy | None = None
    rate_limits: dict[str, float] = msgspec.field(default_factory=dict)
    paused: bool = False

    @property
    def governed_network(self) -> NetworkPolicy | None:
        """What instances may reach, or None when their owners decide."""
        return NetworkPolicy() if NETWORK_ACCESS in self.revoked else self.network


def check_policy(policy: AgentPolicy) -> None:
    """Return when nodes can enforce all that a policy says.

    Raises:
        DsecError: ``unsupported``, naming what cannot be enforced; ``invalid`` for a rate, or a
            network policy that makes no sense.
    """
    for what, named, known in (
        ("permission", policy.revoked, ENFORCED_PERMISSIONS),
        ("rate limit", policy.rate_limits, ENFORCED_RATES),
    ):
        for name in named:
            if name not in known:
                raise DsecError(
                    ErrorCode.UNSUPPORTED,
                    f"nothing enforces the {what} {name[:64]!r}, so a policy cannot name it; what "
                    f"can be named: {', '.join(sorted(known))}",
                    details={"field": what, "name": name[:64]},
                )
    for name, per_s in policy.rate_limits.items():
        if not 0 < per_s <= 1e6:  # noqa: PLR2004  beyond any socket's
            raise invalid(f"rate_limits.{name} is {per_s}: use more than 0 and at most 1000000 a s")
    if policy.network is not None:
        # Which sets of rules there are beside the built-in ones is known to each node alone.
        others = dict.fromkeys(policy.network.rule_sets.keys() - RULE_SETS.keys(), ())
        compile_policy(policy.network, {**RULE_SETS, **others})


class VersionState(StrEnum):
    """What becomes of a version's instances."""

    STANDBY = "standby"
    """Registered; gets work only when asked for by its number."""
    ACTIVE = "active"
    """New work goes to it."""
    DRAINING = "draining"
    """Its instances finish and leave; it gets no new work."""
    FAILED = "failed"
    """As draining: it was taken back because too many of its instances failed."""


# --- Asking ---------------------------------------------------------------------------------------


class UploadPackage(Message, frozen=True, kw_only=True):
    """One piece of a package; any scheduler takes any piece, the same piece again changes nothing.

    Attributes:
        sha256: of the whole package, in hexadecimal.
        index: of the piece, from 0; each but the last has :data:`PACKAGE_CHUNK_BYTES`.
    """

    sha256: str
    index: int
    data: bytes


class PackagePieceKept(Message, frozen=True, kw_only=True):
    """The piece is stored."""

    sha256: str
    index: int


class RegisterAgent(Message, frozen=True, kw_only=True):
    """Register a version of an agent. The first one is active at once, later ones stand by.

    The same again is fine; the same version with anything else is a ``conflict``.

    Attributes:
        description: for listings.
        contract: what the agent's author wrote, kept as it is.
        permissions: what the contract says that the agent needs.
        base: the base layer of its instances, if their requests name none.
        workspace: likewise.
        toolkits: layers on top of those that a request names.
        package_sha256: of a package whose pieces were uploaded before; empty for none.
        package_bytes: its size.
        policy: what its instances may do from the start.
    """

    name: str
    version: str
    description: str = ""
    contract: dict[str, Any] = msgspec.field(default_factory=dict)
    permissions: tuple[str, ...] = ()
    base: str = ""
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    package_sha256: str = ""
    package_bytes: int = 0
    policy: AgentPolicy | None = None


class ListAgents(Message, frozen=True, kw_only=True):
    """Ask for the project's agents, by name.

    Attributes:
        prefix: only names that begin so.
        permission: only agents one of whose versions has this permission.
        after: the last name of the page before.
        limit: at most so many.
    """

    prefix: str = ""
    permission: str = ""
    after: str = ""
    limit: int = 100


class InspectAgent(Message, frozen=True, kw_only=True):
    """Ask for one agent, all its versions, and how many instances each has."""

    name: str


class ListInstances(Message, frozen=True, kw_only=True):
    """Ask for an agent's instances.

    Attributes:
        version: only those of this version.
        node: only those on this node.
        cursor: ``next_cursor`` of the page before.
        limit: about so many in a page: a page ends with a whole document.
    """

    name: str
    version: str = ""
    node: str = ""
    cursor: str = ""
    limit: int = 1000


class RemoveAgent(Message, frozen=True, kw_only=True):
    """Remove a version that nobody uses, or the agent with all its versions.

    Attributes:
        version: the one that goes; empty for all of them.
    """

    name: str
    version: str = ""


class AgentUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's new work goes to another version from now on.

    Attributes:
        drain_idle_s: an instance of another version leaves when nobody has used it for so long.
        drain_timeout_s: it leaves after so long in any case; 0 for no such end.
        failure_window_s: so long the new version is watched; 0 for not at all.
        failure_threshold: the share of ended instances that may have failed meanwhile.
        failure_minimum: judged only once so many have ended.
    """

    name: str
    version: str
    drain_idle_s: float = 5.0
    drain_timeout_s: float = 3600.0
    failure_window_s: float | None = None
    failure_threshold: float | None = None
    failure_minimum: int | None = None


class UpdateAgents(Message, frozen=True, kw_only=True):
    """Roll out versions of several agents at once; None leaves a value to the configuration."""

    updates: tuple[AgentUpdate, ...]


class RevokePermission(Message, frozen=True, kw_only=True):
    """Take permissions away, and leave the rest of each policy as it is.

    Attributes:
        version: only from this version; empty for all, those registered later too.
        instances: only from these; empty for all.
    """

    name: str
    permissions: tuple[str, ...]
    version: str = ""
    instances: tuple[str, ...] = ()


class PushPolicy(Message, frozen=True, kw_only=True):
    """Put instances under a policy, in place of any earlier one.

    Attributes:
        version: only those of this version; empty for all, those registered later too.
        instances: only these, at most :data:`BATCH_MAX`; empty for all.
    """

    name: str
    policy: AgentPolicy
    version: str = ""
    instances: tuple[str, ...] = ()


# --- Answers --------------------------------------------------------------------------------------


class AgentVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version as it was registered, and its state; see :class:`RegisterAgent`."""

    version: str
    state: VersionState
    registered_at: float
    permissions: tuple[str, ...] = ()
    base: str = ""
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    package_sha256: str = ""
    package_bytes: int = 0


class AgentVersionInfo(AgentVersion, frozen=True, kw_only=True):
    """A version. ``instances`` lag behind the nodes by a second or two."""

    contract: dict[str, Any] = msgspec.field(default_factory=dict)
    policy_revision: int = 0
    policy: AgentPolicy | None = None
    instances: int = 0
    finished: int = 0
    failed: int = 0


class RolloutInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The last update; ``state`` is ``watching``, ``settled`` or ``rolled_back``."""

    from_version: str
    to_version: str
    began_at: float
    state: str
    reason: str = ""


class AgentInfo(Message, frozen=True, kw_only=True):
    """An agent; in a listing without contracts and counts."""

    name: str
    description: str
    active: str
    revision: int
    versions: tuple[AgentVersionInfo, ...] = ()
    rollout: RolloutInfo | None = None


class AgentList(Message, frozen=True, kw_only=True):
    """A page of agents; ``more``: a further one exists, ask with ``after`` the last name."""

    agents: tuple[AgentInfo, ...] = ()
    more: bool = False


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that was created for a version, and the policy that holds for it."""

    sandbox_id: str
    version: str
    started_at: float
    policy_revision: int


class InstanceList(Message, frozen=True, kw_only=True):
    """A page of instances; with ``next_cursor`` there may be more."""

    instances: tuple[InstanceInfo, ...] = ()
    next_cursor: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An instance or a node that did not do what was wanted, and why."""

    what: str
    code: ErrorCode
    reason: str


class Governed(Message, frozen=True, kw_only=True):
    """A change is durable; these nodes have said that it is in force.

    Attributes:
        revision: of the change.
        instances: on how many it is in force, as the nodes count them.
        nodes: how many nodes said so.
        silent_nodes: those that hold instances and did not; they learn of it when they are back,
            before they take requests.
        refused: instances that a node could not bring under it (at most 100): they have no network
            where the policy's is not possible, and have ended where anything else is not.
    """

    name: str
    revision: int
    instances: int
    nodes: int
    silent_nodes: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


class UpdateOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one update: the change, or why there is none."""

    name: str
    governed: Governed | None = None
    refusal: Refusal | None = None


class AgentsUpdated(Message, frozen=True, kw_only=True):
    """What came of each update, in order."""

    outcomes: tuple[UpdateOutcome, ...]


class AgentRemoved(Message, frozen=True, kw_only=True):
    """These versions are gone, with the packages that no other version has."""

    name: str
    versions: tuple[str, ...]


class AgentRolledBack(Message, frozen=True, kw_only=True):
    """Event: too many instances of a new version failed, and new work goes to the old one again."""

    name: str
    from_version: str
    to_version: str
    finished: int
    failed: int
