"""What sandboxd asks of the kernel: the one seam between the service and Linux.

Life cycle, in the order a service calls it::

    facts = await kernel.start()            # probe; refuse what facts.missing names
    await kernel.recover()                  # remove what an earlier daemon of this node left
    await kernel.hold_layer(digest, image)  # once per layer, shared by all sandboxes
    await kernel.create(spec)               # returns when PID 1 has been exec'd and answers
    result = await kernel.exec(local, command)
    await kernel.destroy(local)             # idempotent; returns when nothing is left
    await kernel.release_layer(digest)
    await kernel.close()                    # destroys what is still alive

Two implementations keep this contract: :class:`dsec_sandboxd.kernel.linux.LinuxKernel` (the real
one) and :class:`dsec_sandboxd.kernel.recording.RecordingKernel` (for tests of the service).

Text of the sandbox (argv, environment, paths, names in a directory) is ``str`` decoded with
``surrogateescape``, so that any bytes survive a round trip. Output is ``bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

#: The number of ids each sandbox owns, from its base id on the host.
IDS_PER_SANDBOX: Final = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFacts:
    """What this host is and what it can enforce, probed once at the start."""

    kernel_release: str
    cgroup_layout: str
    """``v2`` or ``hybrid`` (controllers on version 1, a bare version 2 tree beside them)."""
    missing: tuple[str, ...]
    """Features that this host lacks, by name; a request that needs one is ``unsupported``."""
    memory_bytes: int
    cpus: int
    sandboxes_max: int
    """How many sandboxes may be alive at once (id ranges, descriptors)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """A sandbox to create. Every limit is enforced by the kernel from its first process on."""

    local: str
    """The node-local id: ``[a-z0-9][a-z0-9_-]{0,62}``."""
    layers: tuple[str, ...]
    """Digests of held layers, lowest first; at least one, at most ``LAYERS_MAX``."""
    memory_bytes: int
    cpus: float
    """A weight against the neighbours; a hard quota only with ``cpu_quota``."""
    pids: int
    disk_bytes: int
    """Size of the writable layer; it lives in memory, so it counts within ``memory_bytes``."""
    inodes: int
    hostname: str = "sandbox"
    run_directory: Path | None = None
    """A host directory seen read-only at ``/run/dsec`` (the agent's socket lives in it)."""
    cpu_quota: bool = False
    """Whether ``cpus`` is also a ceiling. A quota costs creation time; ask only when needed."""


#: The most layers one sandbox may have.
LAYERS_MAX: Final = 16


class Stream(StrEnum):
    """Which output a piece of bytes came from."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSpec:
    """A command to run in a sandbox.

    ``argv[0]`` is looked up in the command's own ``PATH`` inside the sandbox; no shell is involved.
    The environment is exactly ``env``, with ``PATH`` and ``HOME`` filled in when absent.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "0"
    """A number, a ``number:number`` or a name in the sandbox's ``/etc/passwd``."""
    stdin: bytes = b""
    timeout_s: float = 0.0
    """Seconds until the whole process tree gets SIGTERM; 0 means never."""
    grace_s: float = 2.0
    """Seconds between SIGTERM and SIGKILL of the tree."""
    output_limit_bytes: int = 1 << 20
    """How much of each stream is kept, from its beginning; the rest is drained and dropped."""
    merge_stderr: bool = False
    """Whether standard error is the same pipe as standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """How a command ended. Exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    timed_out: bool = False
    """The time limit ended it; the output up to then is kept."""
    oom: bool = False
    """The memory limit killed a process while this command ran, and the command died of SIGKILL."""
    duration_s: float = 0.0


class EndCause(StrEnum):
    """Why a sandbox ended without being asked to."""

    OOM = "oom"
    """The memory limit killed PID 1, or left the sandbox unusable."""
    KILLED = "killed"
    """PID 1 was killed by a signal from outside."""
    EXITED = "exited"
    """PID 1 exited by itself: a defect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxEnded:
    """A sandbox is gone; its remains have been removed when this is delivered."""

    local: str
    cause: EndCause
    detail: str
    """One sentence for people."""


class FileKind(StrEnum):
    """What a path leads to."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStat:
    """A file as the sandbox sees it (ids inside its user namespace)."""

    kind: FileKind
    size_bytes: int
    mode: int
    """Permission bits only."""
    user_id: int
    group_id: int
    modified_at: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryEntry:
    """One name in a directory; links are not followed."""

    name: str
    kind: FileKind


class OpenMode(StrEnum):
    """What an opened file may be used for."""

    READ = "read"
    WRITE = "write"
    """Create or truncate, then write."""
    APPEND = "append"
    """Create when absent, then write at the end."""
    CREATE = "create"
    """Create and write; an existing path is ``conflict``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxUsage:
    """What a sandbox uses now."""

    memory_bytes: int
    memory_peak_bytes: int
    cpu_s: float
    """CPU seconds since its creation."""
    pids: int


class Kernel(Protocol):
    """Sandboxes on one Linux host.

    Every method may be called concurrently for different sandboxes. Errors are
    :class:`~dsec_common.errors.DsecError`:

    - ``not_found``: no such sandbox, path or command (``details["what"]`` says which:
      ``sandbox``, ``path``, ``command``, ``user``, ``directory``);
    - ``invalid``: an argument that can never work (``is_directory``, ``not_a_file`` and
      ``invalid_path`` are told in ``details["reason"]``);
    - ``denied``: the sandbox's own permissions forbid it;
    - ``conflict``: the sandbox, or the path to create, exists;
    - ``exhausted``: memory, ids, descriptors or disk are used up; retry elsewhere or later;
    - ``layer_error``: a layer that is not held or cannot be mounted;
    - ``unsupported``: this host cannot enforce what was asked;
    - ``oom`` / ``unavailable``: the sandbox ended while the call was running;
    - ``internal``: the kernel refused a step; operation, path and errno are in ``details``.
    """

    async def start(self) -> KernelFacts:
        """Start the spawner, probe the host and return what it can enforce."""
        ...

    async def recover(self) -> list[str]:
        """Remove what an earlier daemon of this node left; return the local ids found."""
        ...

    async def hold_layer(self, digest: str, image_path: Path) -> None:
        """Mount an EROFS image once, for all sandboxes. Idempotent.

        Only images that we built may be handed over: a file system image is kernel input.

        Raises:
            DsecError: ``layer_error`` when the file is absent or not an EROFS image.
        """
        ...

    async def release_layer(self, digest: str) -> None:
        """Let go of a layer. Idempotent; living sandboxes keep what they use."""
        ...

    async def create(self, spec: SandboxSpec) -> None:
        """Create a sandbox; on return its PID 1 runs and ``exec`` works.

        A failure at any step leaves nothing behind and names the step in ``details["operation"]``.
        """
        ...

    async def exec(
        self,
        local: str,
        command: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None = None,
    ) -> CommandResult:
        """Run a command and return when its main process has ended.

        Output is always drained, so that a command never blocks on us; ``on_output`` is told of
        each kept piece as it arrives, on the event loop. What a daemon left behind by the command
        writes later is not collected. Cancelling the call kills the whole process tree.
        """
        ...

    async def open_file(
        self,
        local: str,
        path: str,
        mode: OpenMode,
        *,
        permissions: int = 0o644,
        user: str = "0",
    ) -> int:
        """Open a regular file inside the sandbox as ``user``; the caller closes the descriptor.

        The path is absolute and resolved in the sandbox's own root. Never a device, pipe or socket.
        Parent directories are not created.
        """
        ...

    async def stat(self, local: str, path: str, *, user: str = "0") -> FileStat:
        """Describe a path without following a last link."""
        ...

    async def list_directory(
        self, local: str, path: str, *, user: str = "0"
    ) -> list[DirectoryEntry]:
        """List a directory (without ``.`` and ``..``), unsorted; at most 10,000 names."""
        ...

    async def make_directory(
        self,
        local: str,
        path: str,
        *,
        parents: bool = False,
        permissions: int = 0o755,
        user: str = "0",
    ) -> None:
        """Create a directory; with ``parents`` also those above it, and an existing one is fine."""
        ...

    async def rename(self, local: str, source: str, target: str, *, user: str = "0") -> None:
        """Move a path inside the sandbox, replacing a target file atomically."""
        ...

    async def unlink(self, local: str, path: str, *, user: str = "0") -> None:
        """Remove a file, a link or an empty directory."""
        ...

    async def usage(self, local: str) -> SandboxUsage:
        """Return what the sandbox uses now."""
        ...

    async def destroy(self, local: str) -> None:
        """End a sandbox: kill, wait until dead, remove its cgroups, free its ids. Idempotent.

        Running ``exec`` calls fail with ``unavailable``. No ``SandboxEnded`` is delivered.
        """
        ...

    def ended(self) -> AsyncIterator[SandboxEnded]:
        """Yield every sandbox that ends without ``destroy``, until ``close``. One reader."""
        ...

    async def close(self) -> None:
        """Destroy every sandbox, let go of all layers, stop the spawner. Idempotent."""
        ...
