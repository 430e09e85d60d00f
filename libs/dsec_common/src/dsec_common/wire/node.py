"""Nodes: what they have, what is taken, and the scheduler's private talk with them."""

from __future__ import annotations

import msgspec

from dsec_common.wire.base import JSON, Message
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES, CreateSandbox, SandboxInfo


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts that a node can hand out, or has handed out."""

    cpus: float = 0.0
    memory_bytes: int = 0
    sandboxes: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node. ``uuid`` is the driver's, ``model`` its product name."""

    uuid: str
    model: str
    memory_bytes: int = 0


class NodeHeartbeat(Message, frozen=True, kw_only=True):
    """Event, once a second from each node: what it has and what it runs.

    Attributes:
        epoch: changes with every start of the daemon.
        store_id: the layer store's identity; nodes that share one have the same.
        capacity: what may be handed out, oversubscription included.
        allocated: what running and starting sandboxes have been given.
        draining: takes no new sandboxes.
        missing: kernel features this host lacks, with reasons.
    """

    node: str
    epoch: str
    store_id: str = ""
    capacity: Resources = msgspec.field(default_factory=Resources)
    allocated: Resources = msgspec.field(default_factory=Resources)
    physical: Resources = msgspec.field(default_factory=Resources)
    memory_bytes_available: int = 0
    gpus: tuple[Gpu, ...] = ()
    lease_ids: tuple[str, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    version: str = ""
    draining: bool = False
    missing: dict[str, str] = msgspec.field(default_factory=dict)


class NodeInfo(Message, frozen=True, kw_only=True):
    """A node as the broker sees it."""

    node: str
    ready: bool
    reason: str = ""
    last_seen_at: float = 0.0
    cu_total: float = 0.0
    cu_allocated: float = 0.0
    notes: tuple[str, ...] = ()
    heartbeat: NodeHeartbeat


class ListNodes(Message, frozen=True, kw_only=True):
    """Ask the broker for all nodes."""


class NodeList(Message, frozen=True, kw_only=True):
    """All nodes the broker knows, sorted by name, and the cluster's Compute Units."""

    nodes: tuple[NodeInfo, ...] = ()
    cu_total: float = 0.0
    cu_allocated: float = 0.0


class InspectNode(Message, frozen=True, kw_only=True):
    """Ask the broker for one node."""

    node: str


class PlaceSandbox(Message, frozen=True, kw_only=True):
    """Scheduler to node: admit and create, or refuse.

    A node that made the sandbox tells the caller (header ``reply-to``) and the scheduler; one that
    did not tells the scheduler alone, which may go on to another.

    Attributes:
        project: the caller's, known from its connection.
        local: the sandbox's id on the node, chosen by the scheduler.
        request: the caller's request as it was.
        valid_until: Unix seconds; a sandbox that is not ready by then is removed by the node, since
            the scheduler has gone on to another node.
        lease_id: the Compute Unit lease taken for it, or empty.
        caller_content_type: how the caller wants its answer encoded.
    """

    project: str
    local: str
    request: CreateSandbox
    valid_until: float
    lease_id: str = ""
    caller_content_type: str = JSON


class ListNodeSandboxes(Message, frozen=True, kw_only=True):
    """Scheduler to node: which sandboxes of this project are there.

    Attributes:
        after: the sandbox id that the page before ended with; empty for the first page. Pages are
            in the order of :func:`~dsec_common.wire.sandbox.listing_order`.
        page_bytes: about how large a page may be; it holds one sandbox at least.
    """

    project: str
    include_ended: bool = False
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    after: str = ""
    page_bytes: int = LISTING_PAGE_BYTES


class NodeSandboxes(Message, frozen=True, kw_only=True):
    """A node's answer to :class:`ListNodeSandboxes`; ``more`` says that a further page exists."""

    sandboxes: tuple[SandboxInfo, ...] = ()
    more: bool = False
