"""Sandboxes: creating, running commands in, listing and deleting them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.wire.action import ActionTerms
from dsec_common.wire.base import ErrorReply, Message
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.task import TaskFiles, WarmUse
from dsec_common.wire.tools import NodeTools

MIB: Final = 1024 * 1024

MAX_OUTPUT_BYTES: Final = 256 * 1024
"""The most of each output stream that one reply may carry: as JSON, too, it fits NATS's 1 MiB."""

AGENT_CHARACTERS_MAX: Final = 64
"""Of ``agent`` of a sandbox: it stands in logs, leases and bills."""

LISTING_PAGE_BYTES: Final = 128 * 1024
"""About how much one page of a listing holds: as JSON with every character escaped it still fits
NATS's 1 MiB."""


class SandboxState(StrEnum):
    """Where a sandbox is in its life."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    DELETING = "deleting"
    ENDED = "ended"


class IdleAction(StrEnum):
    """What a node does with a sandbox that nobody has used for its idle time."""

    END = "end"
    PAUSE = "pause"


class EndCause(StrEnum):
    """Why a sandbox ended; kept after it.

    ``deleted``: its owner asked; ``expired``: its time to live was over; ``idle``: nobody used it
    for its idle time; ``oom``: its memory ran out; ``exhausted``: it took more than its part of
    what the kernel cannot limit, locks on ranges of files; ``lease_lost``: its Compute Units
    are another's or nobody's; ``exited``: its first process ended;
    ``killed``: its first process was killed from outside; ``node_restarted``: its node stopped or
    was started again; ``create_failed``: it never ran; ``rollback_failed``: neither its old nor its
    new state could be brought up.
    """

    DELETED = "deleted"
    EXPIRED = "expired"
    IDLE = "idle"
    OOM = "oom"
    EXHAUSTED = "exhausted"
    LEASE_LOST = "lease_lost"
    EXITED = "exited"
    KILLED = "killed"
    NODE_RESTARTED = "node_restarted"
    ROLLBACK_FAILED = "rollback_failed"
    CREATE_FAILED = "create_failed"


class CpuClass(StrEnum):
    """Who goes first when processors are short."""

    LATENCY_SENSITIVE = "latency_sensitive"
    """Shares processors by its ``cpus``."""
    BEST_EFFORT = "best_effort"
    """Runs on what all others leave (``SCHED_IDLE``); nothing inside can undo it."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may use; all of it is enforced by the kernel.

    Attributes:
        cpus: processors' worth of CPU time, a share under contention; idle ones may give more.
        memory_bytes: memory, the writable layer included; over it, the OOM killer ends a process.
        pids: processes and threads.
        disk_bytes: size of the writable layer, which lives in memory.
        inodes: files and directories in the writable layer.
        cu: just so many Compute Units of GPU: the short form of :class:`CreateSandbox`'s ``gpu``.
        cpu_class: see :class:`CpuClass`; a ``best_effort`` sandbox's ``cpus`` are no share.
        core_scheduling: never on one processor core (two hardware threads) with another sandbox;
            ``unsupported`` where the kernel cannot do it.
        oom_group: over its memory the sandbox ends whole, with cause ``oom``, not one process.
        cpu_quota: never more than ``cpus``, even while processors are idle.
    """

    cpus: float = 1.0
    memory_bytes: int = 256 * MIB
    pids: int = 512
    disk_bytes: int = 128 * MIB
    inodes: int = 32_768
    cu: float = 0.0
    cpu_class: CpuClass = CpuClass.LATENCY_SENSITIVE
    core_scheduling: bool = False
    oom_group: bool = False
    cpu_quota: bool = False


class ExecCommand(Message, frozen=True, kw_only=True):
    """Run one command in a sandbox and answer when it has ended.

    Attributes:
        argv: program and arguments; the program is looked up on the command's ``PATH``.
        env: variables on top of the sandbox's own.
        cwd: working directory, absolute; empty for the sandbox's own.
        user: name or ``uid[:gid]`` inside the sandbox; empty for the sandbox's own.
        stdin: bytes given to the command, then end of file.
        timeout_s: after it the whole process tree gets TERM, then KILL; at least 0.001.
        output_limit_bytes: kept of each stream; what is more is read and dropped.
        merge_stderr: standard error goes where standard output goes, in the order of printing.
        action: the open action that it is a command of, or empty.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    stdin: bytes = b""
    timeout_s: float = 60.0
    output_limit_bytes: int = MAX_OUTPUT_BYTES
    merge_stderr: bool = False
    action: str = ""


class ExecResult(Message, frozen=True, kw_only=True):
    """How a command ended and what it printed.

    Attributes:
        exit_code: the command's own code, or None when a signal ended it.
        signal: the signal's number, or None.
        timed_out: the platform ended it at ``timeout_s``; the output so far is kept.
        oom: the kernel's out-of-memory killer ended a process of the sandbox meanwhile.
        oom_process: which, by name; empty where the node's kernel does not tell.
        oom_pid: its process id inside; 0 when it was gone before it could be asked.
        duration_s: from start to end, measured by the node.
    """

    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    timed_out: bool = False
    oom: bool = False
    duration_s: float = 0.0
    oom_process: str = ""
    oom_pid: int = 0


class CreateSandbox(Message, frozen=True, kw_only=True):
    """Ask for a sandbox.

    Attributes:
        base: base image layer, ``name@version`` or ``sha256:…``; empty with a ``snapshot``.
        workspace: the layer over it, or empty.
        toolkits: the layers on top, toolkits and data, lowest first.
        limits: see :class:`Limits`.
        env: variables of every command in it, on top of those that its base's image says.
        labels: the caller's own, returned in listings.
        agent: the agent type written into behaviour logs.
        agent_version: makes the sandbox an instance of this version of the registered ``agent``;
            ``active`` is the one that new work goes to. Empty is that, too, where the project has
            registered such an agent, and nothing where it has not.
        rollout_id: binds the sandbox's agent socket to this rollout.
        model_rollout_id: gives it a model endpoint, whose calls go to this rollout, which is for
            them alone; empty for none.
        ttl_s: the node ends the sandbox after this many seconds; 0 means never. See
            :class:`~dsec_common.wire.life.TouchSandbox`.
        idle_ttl_s: after so many seconds without use the node takes ``idle_action``; 0 means never.
            A request uses it until it is answered, so does a call of its agent.
        idle_action: ``end`` or ``pause``.
        command: the first command, run as soon as the sandbox runs and answered with it. How it
            ends is a result; the sandbox is there all the same.
        delete_after: the sandbox goes when ``command`` has ended.
        network: what it may reach; None is nothing.
        setup_network: what it may reach until ``enter_agent_phase`` is asked for, if that differs.
        snapshot: its files are those of this snapshot, which also names the layers below.
        idempotency_key: the same key with the same arguments returns the same sandbox; with other
            arguments it is a ``conflict``. Empty means no key.
        timeout_s: how long the caller waits for an answer.
        warm: see :class:`WarmUse`.
        task: files to write before ``command``, and to answer with its end.
        cwd: of commands that name none; empty for what its base's image says, or ``/``.
        user: of commands that name none; empty for what its base's image says, or ``root``.
        gpu: GPUs that the scheduler takes a lease on from the broker.
        service_class: what is promised to a request with ``gpu``.
        priority: among those that wait for Compute Units the higher goes first.
        deadline_s: the node ends the sandbox after this many seconds, whatever becomes of ``ttl_s``
            and whoever touches it; 0 means never.
        tools: the tools of its agent that its node runs; None for none.
        action_terms: what its agent's contract allows its actions; None for no contract.
        remade: it is made of a checkpoint of another one: its layers are all named, so its agent
            adds none; with a ``snapshot`` it has the variables of the sandbox that this was taken
            of, under those of ``env``. So they never leave their node.
    """

    base: str
    workspace: str = ""
    toolkits: tuple[str, ...] = ()
    limits: Limits = msgspec.field(default_factory=Limits)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    rollout_id: str = ""
    ttl_s: float = 0.0
    idle_ttl_s: float = 0.0
    idle_action: IdleAction = IdleAction.END
    command: ExecCommand | None = None
    delete_after: bool = False
    network: NetworkPolicy | None = None
    setup_network: NetworkPolicy | None = None
    idempotency_key: str = ""
    timeout_s: float = 30.0
    snapshot: str = ""
    warm: WarmUse = WarmUse.PREFER
    task: TaskFiles | None = None
    cwd: str = ""
    user: str = ""
    agent_version: str = ""
    gpu: GpuDemand | None = None
    service_class: ServiceClass = ServiceClass.STANDARD
    priority: int = 0
    model_rollout_id: str = ""
    deadline_s: float = 0.0
    tools: NodeTools | None = None
    action_terms: ActionTerms | None = None
    remade: bool = False

    @property
    def gpu_demand(self) -> GpuDemand | None:
        """What it asks of GPUs, in either form; None for nothing."""
        if self.gpu is not None or not self.limits.cu:
            return self.gpu
        return GpuDemand(min_cu=self.limits.cu, max_cu=self.limits.cu)


class SandboxCreated(Message, frozen=True, kw_only=True):
    """The sandbox runs and answers commands.

    Attributes:
        result: how the request's command ended, if it had one and it was run.
        error: why it was not run, or why what came of it is not known.
        warm: it had been made ahead of need.
        files: those of the request's task that were to be read and are there.
    """

    sandbox_id: str
    node: str
    created_at: float
    layers: tuple[str, ...]
    limits: Limits
    lease_id: str = ""
    create_ms: float = 0.0
    result: ExecResult | None = None
    error: ErrorReply | None = None
    warm: bool = False
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


class SandboxInfo(Message, frozen=True, kw_only=True):
    """A sandbox as its node knows it; the cause stays after the end.

    Attributes:
        expires_at: Unix time at which its node ends it; 0 means never.
        idle_s: how long nobody has used it; told by an inspection while it runs.
        paused_at: since when it stands still; 0 when it does not.
        memory_bytes_used: told, as the two after it, by an inspection, and by a listing that asks
            for ``usage``, of a sandbox that runs or stands still; else None.
        first_command: ``running``, ``done`` or ``lost``, told by an inspection of a sandbox that
            was created with a command; ``result``, ``error`` and ``files`` are those of
            :class:`SandboxCreated`, the output perhaps shorter.
        snapshot: the snapshot that it was made from, last put back to or last taken of.
        daemon_s: told by an inspection: since when its node's daemon has been there. What was asked
            before that, an earlier one was asked.
        paused_s: told by an inspection: how long it has stood still in all. Its commands' time
            limits stood still with it.
        state_version_ms: told, as the two after it, by an inspection of an agent's instance: how
            new its state is (Unix time).
        behind: why it stands still until it is synchronised with what it depends on; else empty.
        synchronise_error: why it could not be synchronised.
        template: told by an inspection that asks for it: the request for another one like it, but
            for its files and what stays its own; see ``remade`` of :class:`CreateSandbox`.
    """

    sandbox_id: str
    project: str
    state: SandboxState
    created_at: float
    layers: tuple[str, ...] = ()
    limits: Limits = msgspec.field(default_factory=Limits)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    rollout_id: str = ""
    ttl_s: float = 0.0
    expires_at: float = 0.0
    idle_ttl_s: float = 0.0
    idle_action: IdleAction = IdleAction.END
    idle_s: float = 0.0
    paused_at: float = 0.0
    ended_at: float = 0.0
    end_cause: EndCause | None = None
    end_detail: str = ""
    memory_bytes_used: int | None = None
    cpu_seconds_used: float | None = None
    pids_used: int | None = None
    first_command: str = ""
    result: ExecResult | None = None
    error: ErrorReply | None = None
    snapshot: str = ""
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    daemon_s: float = 0.0
    paused_s: float = 0.0
    agent_version: str = ""
    state_version_ms: int = 0
    behind: str = ""
    synchronise_error: str = ""
    template: CreateSandbox | None = None


class InspectSandbox(Message, frozen=True, kw_only=True):
    """Ask for one sandbox's :class:`SandboxInfo`, on demand with its ``template``."""

    template: bool = False


class DeleteSandbox(Message, frozen=True, kw_only=True):
    """End a sandbox and free all it holds; works from every state, any number of times."""


class SandboxDeleted(Message, frozen=True, kw_only=True):
    """The sandbox holds nothing any more."""

    sandbox_id: str
    end_cause: EndCause


class ListSandboxes(Message, frozen=True, kw_only=True):
    """Ask for the project's sandboxes on all nodes.

    Attributes:
        include_ended: also those whose record is kept after their end.
        labels: only sandboxes that carry all of these.
        after: the id of the last sandbox of the page before; empty for the first page.
        states: only sandboxes in one of these; naming ``ended`` includes the ended.
        agent: only those of this agent type.
        rollout_id: only those of this rollout.
        created_after: only those created at this Unix time or later; 0 means any.
        created_before: only those created before it; 0 means any.
        limit: at most so many in a page; 0 leaves it to the size of a message.
        cursor: ``next_cursor`` of the page before, in place of ``after``; for the same question
            only.
        usage: tell what each uses, too, which costs its node a few reads from the kernel.
    """

    include_ended: bool = False
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    after: str = ""
    states: tuple[SandboxState, ...] = ()
    agent: str = ""
    rollout_id: str = ""
    created_after: float = 0.0
    created_before: float = 0.0
    limit: int = 0
    cursor: str = ""
    usage: bool = False


class SandboxList(Message, frozen=True, kw_only=True):
    """One page of the sandboxes found, oldest first, and the nodes that did not answer in time.

    ``more`` says that a further page exists: ask again with ``next_cursor``, or with ``after`` the
    last one's id.
    """

    sandboxes: tuple[SandboxInfo, ...] = ()
    silent_nodes: tuple[str, ...] = ()
    more: bool = False
    next_cursor: str = ""


def listing_order(sandbox_id: str) -> tuple[str, str]:
    """Return the key by which listings are sorted: local ids sort by time, over all nodes."""
    owner, _, local = sandbox_id.partition(".")
    return local, owner


class SandboxRunning(Message, frozen=True, kw_only=True):
    """Event: a sandbox came to life. ``request_id`` is the create request's message id."""

    sandbox_id: str
    request_id: str
    created: SandboxCreated


class SandboxEnded(Message, frozen=True, kw_only=True):
    """Event: a sandbox ended."""

    sandbox_id: str
    cause: EndCause
    detail: str = ""


class SandboxRefused(Message, frozen=True, kw_only=True):
    """Event: a queued request ended without a sandbox."""

    request_id: str
    code: str
    reason: str
