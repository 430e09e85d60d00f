"""Sandboxes: creating, running commands in, moving files to and from, listing and deleting them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from dsec_common.wire.base import Message

MIB: Final = 1024 * 1024

MAX_OUTPUT_BYTES: Final = 256 * 1024
"""The most of each output stream that one reply may carry: as JSON, too, it fits NATS's 1 MiB."""

FILE_CHUNK_BYTES: Final = 128 * 1024
"""The most file content that one message carries."""

LISTING_PAGE_BYTES: Final = 128 * 1024
"""About how much one page of a listing holds: as JSON with every character escaped it still fits
NATS's 1 MiB."""


class SandboxState(StrEnum):
    """Where a sandbox is in its life."""

    CREATING = "creating"
    RUNNING = "running"
    DELETING = "deleting"
    ENDED = "ended"


class EndCause(StrEnum):
    """Why a sandbox ended; kept after it."""

    DELETED = "deleted"
    EXPIRED = "expired"
    OOM = "oom"
    EXITED = "exited"
    NODE_RESTARTED = "node_restarted"
    CREATE_FAILED = "create_failed"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may use; all of it is enforced by the kernel.

    Attributes:
        cpus: processors' worth of CPU time, as a share under contention.
        memory_bytes: memory, the writable layer included; over it, the OOM killer ends a process.
        pids: processes and threads.
        disk_bytes: size of the writable layer, which lives in memory.
        inodes: files and directories in the writable layer.
        cu: Compute Units of GPU; above 0 the scheduler takes a lease from the broker.
    """

    cpus: float = 1.0
    memory_bytes: int = 256 * MIB
    pids: int = 512
    disk_bytes: int = 128 * MIB
    inodes: int = 32_768
    cu: float = 0.0


class ExecCommand(Message, frozen=True, kw_only=True):
    """Run one command in a sandbox and answer when it has ended.

    Attributes:
        argv: program and arguments; the program is looked up on the command's ``PATH``.
        env: variables on top of the sandbox's own.
        cwd: working directory, absolute.
        user: name or ``uid[:gid]`` inside the sandbox.
        stdin: bytes given to the command, then end of file.
        timeout_s: after it the whole process tree gets TERM, then KILL; at least 0.001.
        output_limit_bytes: kept of each stream; what is more is read and dropped.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    cwd: str = "/"
    user: str = "root"
    stdin: bytes = b""
    timeout_s: float = 60.0
    output_limit_bytes: int = MAX_OUTPUT_BYTES


class ExecResult(Message, frozen=True, kw_only=True):
    """How a command ended and what it printed.

    Attributes:
        exit_code: the command's own code, or None when a signal ended it.
        signal: the signal's number, or None.
        timed_out: the platform ended it at ``timeout_s``; the output so far is kept.
        oom: the kernel's out-of-memory killer ended a process of the sandbox meanwhile.
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


class CreateSandbox(Message, frozen=True, kw_only=True):
    """Ask for a sandbox.

    Attributes:
        base: base image layer, ``name@version`` or ``sha256:…``.
        workspace: the layer over it, or empty.
        toolkits: the layers on top, lowest first.
        limits: see :class:`Limits`.
        env: variables of every command in it.
        labels: the caller's own, returned in listings.
        agent: the agent type written into behaviour logs.
        rollout_id: binds the sandbox's agent socket to this rollout.
        ttl_s: the node ends the sandbox after this many seconds; 0 means never.
        idempotency_key: the same key with the same arguments returns the same sandbox; with other
            arguments it is a ``conflict``. Empty means no key.
        timeout_s: how long the caller waits for an answer.
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
    idempotency_key: str = ""
    timeout_s: float = 30.0


class SandboxCreated(Message, frozen=True, kw_only=True):
    """The sandbox runs and answers commands."""

    sandbox_id: str
    node: str
    created_at: float
    layers: tuple[str, ...]
    limits: Limits
    lease_id: str = ""
    create_ms: float = 0.0


class SandboxInfo(Message, frozen=True, kw_only=True):
    """A sandbox as its node knows it; the cause stays after the end."""

    sandbox_id: str
    project: str
    state: SandboxState
    created_at: float
    layers: tuple[str, ...] = ()
    limits: Limits = msgspec.field(default_factory=Limits)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    rollout_id: str = ""
    expires_at: float = 0.0
    ended_at: float = 0.0
    end_cause: EndCause | None = None
    end_detail: str = ""
    memory_bytes_used: int = 0
    cpu_seconds_used: float = 0.0
    pids_used: int = 0


class InspectSandbox(Message, frozen=True, kw_only=True):
    """Ask for one sandbox's :class:`SandboxInfo`."""


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
    """

    include_ended: bool = False
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    after: str = ""


class SandboxList(Message, frozen=True, kw_only=True):
    """One page of the sandboxes found, oldest first, and the nodes that did not answer in time.

    ``more`` says that a further page exists: ask again with ``after`` the last one's id.
    """

    sandboxes: tuple[SandboxInfo, ...] = ()
    silent_nodes: tuple[str, ...] = ()
    more: bool = False


def listing_order(sandbox_id: str) -> tuple[str, str]:
    """Return the key by which listings are sorted: local ids sort by time, over all nodes."""
    owner, _, local = sandbox_id.partition(".")
    return local, owner


class ReadFile(Message, frozen=True, kw_only=True):
    """Read a piece of a regular file; symlinks are followed inside the sandbox only."""

    path: str
    offset: int = 0
    length: int = FILE_CHUNK_BYTES
    user: str = "root"


class FileChunk(Message, frozen=True, kw_only=True):
    """A piece of a file. ``version`` changes when the file does, so a reader sees a torn read."""

    data: bytes
    offset: int
    size_bytes: int
    end_of_file: bool
    mode: int = 0o644
    version: str = ""


class WriteFile(Message, frozen=True, kw_only=True):
    """Write a piece of a file that appears at ``path`` when the last piece is in and verified.

    Attributes:
        upload_id: the same for all pieces of one file.
        final: this is the last piece; ``size_bytes`` and ``sha256`` are then checked and the file
            takes its place by a rename, or nothing changes.
        make_parents: create missing parent directories.
    """

    path: str
    upload_id: str
    data: bytes = b""
    offset: int = 0
    final: bool = True
    size_bytes: int = 0
    sha256: str = ""
    mode: int = 0o644
    user: str = "root"
    make_parents: bool = True


class FileWritten(Message, frozen=True, kw_only=True):
    """The piece, or with ``complete`` the whole file, is in the sandbox."""

    received_bytes: int
    complete: bool = False


class FileKind(StrEnum):
    """What a path is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class FileInfo(Message, frozen=True, kw_only=True):
    """What ``lstat`` says of a path inside the sandbox."""

    path: str
    kind: FileKind
    size_bytes: int = 0
    mode: int = 0
    modified_at: float = 0.0
    link_target: str = ""


class StatFile(Message, frozen=True, kw_only=True):
    """Ask what a path is."""

    path: str
    user: str = "root"


class ListDirectory(Message, frozen=True, kw_only=True):
    """Ask for a directory's entries, sorted by name; ``after`` continues a long listing."""

    path: str
    after: str = ""
    limit: int = 1000
    user: str = "root"


class DirectoryListing(Message, frozen=True, kw_only=True):
    """Entries of one directory; ``more`` says that a further page exists."""

    entries: tuple[FileInfo, ...] = ()
    more: bool = False


class MakeDirectory(Message, frozen=True, kw_only=True):
    """Create a directory and its parents; an existing one is fine."""

    path: str
    mode: int = 0o755
    user: str = "root"


class DirectoryMade(Message, frozen=True, kw_only=True):
    """The directory exists."""

    path: str


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
