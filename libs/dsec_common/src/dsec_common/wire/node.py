"""Nodes: what they have, what is taken, and the scheduler's private talk with them."""

from __future__ import annotations

import msgspec

from dsec_common.compute.model import CardMode, Slice
from dsec_common.wire.agent_node import AgentRules
from dsec_common.wire.base import JSON, Message
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES, CreateSandbox, SandboxInfo, SandboxState

UPLINK = "uplink"
"""In ``missing`` of a heartbeat: the node leads nowhere outside."""


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts that a node can hand out, or has handed out."""

    cpus: float = 0.0
    memory_bytes: int = 0
    sandboxes: int = 0


class GpuInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a GPU that is cut in hardware.

    Attributes:
        uuid: the driver's, as ``CUDA_VISIBLE_DEVICES`` takes it.
        profile: such as ``1g.5gb``; empty when the driver does not tell.
        memory_bytes: its own memory.
        compute_slices: how many of the GPU's :attr:`Gpu.compute_slices` are its.
    """

    uuid: str
    profile: str = ""
    memory_bytes: int = 0
    compute_slices: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node, as far as it stays the same while nothing breaks.

    Attributes:
        uuid: the driver's.
        model: its product name, or what ``nodes.yaml`` says instead.
        memory_bytes: all of its memory.
        index: the driver's number for it on this node.
        island: GPUs of a node with the same are joined by NVLink or NVSwitch, directly or through
            others; empty for one that is joined to none.
        pcie_bytes_per_s: what its link to the host carries at most, in one direction.
        numa_node: the one that it is attached to; -1 where the machine has no such thing.
        mode: how it can be divided; a node that does not tell has CUDA's MPS.
        mig: its instances; empty unless cut in hardware.
        compute_slices: into how many equal parts the hardware cuts it; 0 when it is not cut.
        healthy: whether work can be given to it.
        reason: why not.
    """

    uuid: str
    model: str
    memory_bytes: int = 0
    index: int = 0
    island: str = ""
    pcie_bytes_per_s: int = 0
    numa_node: int = -1
    mode: CardMode = CardMode.MPS
    mig: tuple[GpuInstance, ...] = ()
    compute_slices: int = 0
    healthy: bool = True
    reason: str = ""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """What changes from second to second on one GPU.

    Attributes:
        uuid: whose.
        utilisation: the part of the last moment in which it worked, 0 to 1.
        memory_bytes_used: what of its memory is taken.
        pcie_bytes_per_s: what its link carries now, in one direction; below its best while idle.
        processes: how many processes use it.
    """

    uuid: str
    utilisation: float = 0.0
    memory_bytes_used: int = 0
    pcie_bytes_per_s: int = 0
    processes: int = 0


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """Processors that are equally near to some memory."""

    number: int
    processors: tuple[int, ...] = ()
    memory_bytes: int = 0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is made of, as far as it stays the same.

    Attributes:
        processor_model: as the processor calls itself.
        sockets: processor packages.
        cores: physical cores.
        threads: what the kernel schedules on.
        numa: one entry where memory is equally far for all.
        disk_bytes: size of the file system that holds the node's state.
        kernel: its release.
        features: what of the kernel's optional parts is there, such as ``erofs`` or ``cgroup2``.
        driver: the GPU driver's version.
    """

    processor_model: str = ""
    sockets: int = 0
    cores: int = 0
    threads: int = 0
    numa: tuple[NumaNode, ...] = ()
    disk_bytes: int = 0
    kernel: str = ""
    features: tuple[str, ...] = ()
    driver: str = ""


class NodeHeartbeat(Message, frozen=True, kw_only=True):
    """Event, once a second from each node: what it has and what it runs.

    Attributes:
        epoch: changes with every start of the daemon.
        store_id: the layer store's identity; nodes that share one have the same.
        capacity: what may be handed out, oversubscription included.
        allocated: what running and starting sandboxes have been given.
        draining: takes no new sandboxes.
        missing: what this host lacks, with reasons: kernel features, ``gpu``, ``uplink``.
        warm: how many sandboxes wait, by the name of their pool.
        gpus: its GPUs, as far as they stay the same.
        gpu_readings: what changes on them; never worth a record of its own.
        machine: what the node is made of.
        disk_bytes_available: what of ``machine.disk_bytes`` is free.
        lease_resizes: how often leases have got other slices, as far as the node knows; those that
            never did are left out.
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
    warm: dict[str, int] = msgspec.field(default_factory=dict)
    gpu_readings: tuple[GpuReading, ...] = ()
    machine: Machine = Machine()
    disk_bytes_available: int = 0
    lease_resizes: dict[str, int] = msgspec.field(default_factory=dict)


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
    """Ask the broker for nodes, by name.

    Attributes:
        after: the last name of the page before.
        limit: at most so many; 0 for as many as fit into an answer.
    """

    after: str = ""
    limit: int = 0


class NodeList(Message, frozen=True, kw_only=True):
    """Nodes that the broker knows, sorted by name, and the Compute Units of the whole cluster.

    ``more`` says that a further page exists: ask again with ``after`` the last name.
    """

    nodes: tuple[NodeInfo, ...] = ()
    cu_total: float = 0.0
    cu_allocated: float = 0.0
    more: bool = False


class InspectNode(Message, frozen=True, kw_only=True):
    """Ask the broker for one node."""

    node: str


class PlaceSandbox(Message, frozen=True, kw_only=True):
    """Scheduler to node: admit and create, or refuse.

    A node that made the sandbox tells the caller (header ``reply-to``) and the scheduler; one that
    did not tells the scheduler alone, which may go on to another.

    Attributes:
        project: the caller's, known from its connection.
        local: an id for the sandbox on the node, chosen by the scheduler. It is found by that, even
            where it has another of its own because it was made ahead of need.
        request: the caller's request as it was.
        valid_until: Unix seconds by the node's own clock, as its heartbeats tell that; a sandbox
            that is not ready by then is removed by the node, since the scheduler has gone on to
            another node.
        lease_id: the Compute Unit lease taken for it, or empty.
        slices: what that lease holds of the node's GPUs.
        caller_content_type: how the caller wants its answer encoded.
        agent_rules: what its agent's instances may do, as the scheduler knows it.
    """

    project: str
    local: str
    request: CreateSandbox
    valid_until: float
    lease_id: str = ""
    caller_content_type: str = JSON
    slices: tuple[Slice, ...] = ()
    agent_rules: AgentRules | None = None


class ListNodeSandboxes(Message, frozen=True, kw_only=True):
    """Scheduler to node: which sandboxes of this project are there.

    Attributes:
        after: the sandbox id that the page before ended with; empty for the first page. Pages are
            in the order of :func:`~dsec_common.wire.sandbox.listing_order`.
        page_bytes: about how large a page may be; it holds one sandbox at least.
        limit: at most so many sandboxes; 0 means no such limit.

    The rest is as in :class:`~dsec_common.wire.sandbox.ListSandboxes`.
    """

    project: str
    include_ended: bool = False
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    after: str = ""
    page_bytes: int = LISTING_PAGE_BYTES
    states: tuple[SandboxState, ...] = ()
    agent: str = ""
    rollout_id: str = ""
    created_after: float = 0.0
    created_before: float = 0.0
    limit: int = 0
    usage: bool = False


class NodeSandboxes(Message, frozen=True, kw_only=True):
    """A node's answer to :class:`ListNodeSandboxes`; ``more`` says that a further page exists."""

    sandboxes: tuple[SandboxInfo, ...] = ()
    more: bool = False
