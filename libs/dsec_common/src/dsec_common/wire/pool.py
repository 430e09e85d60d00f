"""Warm pools: sandboxes made ahead of need, and functions called in them."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.sandbox import ExecCommand, ExecResult, Limits
from dsec_common.wire.task import WarmUse

POOL_SIZE_MAX: Final = 10_000
"""The most sandboxes that one pool may hold, on all nodes together."""

CALL_FILES_MAX_BYTES: Final = 192 * 1024
"""The most that the files of one call may hold together, each way: with its output they fit
NATS's 1 MiB."""


def pool_key(
    project: str, base: str, workspace: str, toolkits: tuple[str, ...], limits: Limits
) -> str:
    """Return the name of the pool that a sandbox of these layers could come from.

    All else that is in it cannot be changed once a sandbox is made: CPU class, core scheduling,
    whether ``cpus`` is a ceiling, and what happens when memory runs out.
    """
    fixed = (
        limits.cpu_class.value,
        limits.core_scheduling,
        limits.oom_group,
        limits.cpu_quota,
    )
    whole = msgspec.json.encode((project, base, workspace, toolkits, fixed))
    return hashlib.sha256(whole).hexdigest()[:24]


class PoolSpec(Message, frozen=True, kw_only=True):
    """A pool as its project wants it: what the scheduler keeps.

    Attributes:
        size: sandboxes to hold ready, on all nodes together.
        limits: of those that wait; whoever is given one has its own.
    """

    project: str
    base: str
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    size: int = 1
    limits: Limits = msgspec.field(default_factory=Limits)

    @property
    def key(self) -> str:
        """The pool's name."""
        return pool_key(self.project, self.base, self.workspace, self.toolkits, self.limits)


class SetPool(Message, frozen=True, kw_only=True):
    """Have sandboxes of these layers ready; the same layers again change size and limits.

    Attributes:
        size: how many, on all nodes together; at most :data:`POOL_SIZE_MAX`.
        limits: of those that wait; whoever is given one has its own. Its CPU class, core
            scheduling, ``oom_group`` and ``cpu_quota`` are part of which pool it is.
    """

    base: str
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    size: int = 1
    limits: Limits = msgspec.field(default_factory=Limits)


class PoolOnNode(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's part on one node. ``note`` says why it is smaller than wanted."""

    node: str
    wanted: int
    ready: int = 0
    note: str = ""


class PoolInfo(Message, frozen=True, kw_only=True):
    """A pool and what there is of it.

    Attributes:
        key: its name.
        ready: sandboxes that wait, on all nodes.
        nodes: where.
    """

    key: str
    base: str
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    size: int = 0
    limits: Limits = msgspec.field(default_factory=Limits)
    ready: int = 0
    nodes: tuple[PoolOnNode, ...] = ()


class ListPools(Message, frozen=True, kw_only=True):
    """Ask for the project's pools."""


class PoolList(Message, frozen=True, kw_only=True):
    """The project's pools, by layers."""

    pools: tuple[PoolInfo, ...] = ()


class RemovePool(Message, frozen=True, kw_only=True):
    """Have no sandboxes ready any more. A pool that is not there is ``not_found``."""

    key: str


class PoolRemoved(Message, frozen=True, kw_only=True):
    """The pool is gone; sandboxes that were handed out live on."""

    key: str


class NodePool(msgspec.Struct, frozen=True, kw_only=True):
    """A node's part of a pool."""

    key: str
    project: str
    base: str
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    limits: Limits = msgspec.field(default_factory=Limits)
    wanted: int = 0


class SetNodePools(Message, frozen=True, kw_only=True):
    """Scheduler to node: hold these pools and no others. Sent again and again."""

    pools: tuple[NodePool, ...] = ()


class NodePoolState(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has of a pool; ``note`` says why it is not all of it."""

    key: str
    wanted: int = 0
    ready: int = 0
    note: str = ""


class NodePools(Message, frozen=True, kw_only=True):
    """A node's answer to :class:`SetNodePools`."""

    pools: tuple[NodePoolState, ...] = ()


class CallStatus(StrEnum):
    """What came of a call: whose doing it is."""

    SUCCESS = "success"
    """The command ended with code 0, and the files asked for are there."""
    FAILED = "failed"
    """The command itself failed: another code, a signal, its time or memory, no such program."""
    SANDBOX_ERROR = "sandbox_error"
    """The platform could not run it or lost it; ``error`` says whether trying again may help."""


class CallFunction(Message, frozen=True, kw_only=True):
    """Run one task in a sandbox of its own, which is gone afterwards.

    Attributes:
        command: what to run.
        files: written first, by absolute path; directories above are made.
        collect: paths of regular files to return afterwards.
        warm: whether a sandbox that waits is to be used.
        idempotency_key: the same key again is the same call: it does not run twice.
        timeout_s: how long a sandbox may take to be there; the command has its own time.

    The rest is as in :class:`~dsec_common.wire.sandbox.CreateSandbox`.
    """

    base: str
    command: ExecCommand
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    collect: tuple[str, ...] = ()
    limits: Limits = msgspec.field(default_factory=Limits)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    warm: WarmUse = WarmUse.PREFER
    idempotency_key: str = ""
    timeout_s: float = 30.0
    agent_version: str = ""


class FunctionResult(Message, frozen=True, kw_only=True):
    """What came of a call.

    Attributes:
        result: how the command ended; None when it never ran.
        files: the contents of those of ``collect`` that there are.
        error: why it is no success, unless the command's own end says so.
        sandbox_id: where it ran; empty when there was none.
        warm: its sandbox had been made ahead of need.
    """

    status: CallStatus
    result: ExecResult | None = None
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    error: ErrorReply | None = None
    sandbox_id: str = ""
    warm: bool = False
