"""What sandboxd asks of the kernel: the one seam between the service and Linux.

Life cycle, in the order a service calls it::

    facts = await kernel.start()            # probe; refuse what facts.missing names
    await kernel.adopt(identities)          # take over living sandboxes of an earlier daemon
    await kernel.recover()                  # remove what else it left
    await kernel.hold_layer(digest, image)  # once per layer, shared by all sandboxes
    await kernel.create(spec)               # returns when PID 1 has been exec'd and answers
    result = await kernel.exec(local, command)
    await kernel.destroy(local)             # idempotent; returns when nothing is left
    await kernel.release_layer(digest)
    await kernel.close()                    # destroys what is still alive, unless told to keep it

Two implementations keep this contract: :class:`dsec_sandboxd.kernel.linux.LinuxKernel` (the real
one) and :class:`dsec_sandboxd.kernel.recording.RecordingKernel` (for tests of the service).

Text of the sandbox (argv, environment, paths, names in a directory) is ``str`` decoded with
``surrogateescape``, so that any bytes survive a round trip. Output is ``bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from dsec_sandboxd.kernel.file_ports import FileKernel
from dsec_sandboxd.kernel.layer_copies import SnapshotKernel
from dsec_sandboxd.kernel.lending import LendingKernel
from dsec_sandboxd.kernel.pausing import AloneKernel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Collection, Mapping
    from pathlib import Path

    from dsec_sandboxd.kernel.file_ports import DirectoryEntry, FileStat
    from dsec_sandboxd.kernel.process import OutputKeeper, Process

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


class DeviceNode(NamedTuple):
    """A character device: its name below ``/dev``, and what it is."""

    name: str
    major: int
    minor: int


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
    best_effort: bool = False
    """Whether all its processes run on idle processors only (SCHED_IDLE), for good."""
    core_scheduling: bool = False
    """Whether no other sandbox may run on the same processor core at the same time; ``unsupported``
    where ``KernelFacts.missing`` names ``core_scheduling``."""
    oom_group: bool = False
    """Whether running out of memory ends the whole sandbox instead of one process."""
    devices: tuple[DeviceNode, ...] = ()
    """Character devices in its ``/dev`` beside those that every sandbox has."""
    mps_pipes: Path | None = None
    """A host directory seen read-only at ``/run/dsec/mps``, if ``run_directory`` has an ``mps``."""
    on_snapshot: bool = False
    """Whether the topmost layer is a copy of a writable layer: ``/`` and ``/tmp`` are then as they
    were in that sandbox."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxIdentity:
    """By what a later daemon recognises a living sandbox; to be kept with its record."""

    init_inode: int
    """Of its PID 1 in pidfs: never used twice while the host is up."""
    slot: int
    base_id: int
    """The first of its ids on the host."""
    oom_group: bool = False
    handle: str = ""
    """What its cgroups are called, where that is not its id: it was made anew."""
    protocol: int = 1
    """What its PID 1 speaks; a daemon that speaks another one cannot take it over."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """Something of this node that belonged to nobody, and was removed."""

    kind: str
    """``cgroup``, ``process``, ``writable_layer``, ``layer``, and so on."""
    name: str


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
    terminal: tuple[int, int] | None = None
    """Rows and columns of a terminal to run on; for ``Kernel.launch`` only."""
    with_input: bool = False
    """Whether its standard input is written piece by piece; for ``Kernel.launch`` only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OomVictim:
    """A process that the kernel ended for want of memory."""

    name: str
    """Its own word for itself, at most 15 characters, all printable."""
    pid: int
    """Its id inside the sandbox; 0 when it was gone before it could be asked."""


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
    """A process of the sandbox was ended for want of memory while this command ran and failed."""
    oom_victim: OomVictim | None = None
    """Which: the command's own if there is one; None where the kernel does not tell."""
    duration_s: float = 0.0


class EndCause(StrEnum):
    """Why a sandbox ended without being asked to."""

    OOM = "oom"
    """The memory limit killed PID 1, or left the sandbox unusable."""
    EXHAUSTED = "exhausted"
    """It took more than its part of what the node shares and the kernel cannot limit: locks on
    ranges of files."""
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


class Kernel(FileKernel, SnapshotKernel, AloneKernel, LendingKernel, Protocol):
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

    def identity(self, local: str) -> SandboxIdentity:
        """Return by what a later daemon recognises a sandbox; it stays the same for its life."""
        ...

    async def adopt(
        self, known: Mapping[str, SandboxIdentity], paused: Collection[str] = ()
    ) -> dict[str, str]:
        """Take over the sandboxes that an earlier daemon of this node made, by local id.

        Afterwards they are as if created here, with their processes, files and limits untouched.
        In those that are ``paused`` nothing runs meanwhile, nor after it, but PID 1, which answers
        until ``pause`` has it stand still, too. All others run.
        Returned is why each other one could not be taken over; ``recover`` removes its remains.
        """
        ...

    async def recover(self) -> list[str]:
        """Remove what an earlier daemon of this node left; return the local ids found.

        Sandboxes of this kernel, living or being born, are not touched: it may be called any time.
        """
        ...

    async def reconcile(self, is_held: Callable[[str], bool]) -> list[Orphan]:
        """Remove all of this node in the kernel that belongs to nobody; return what was found.

        ``is_held`` says whether somebody needs a layer. It may be called any time.
        """
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

    async def replace(self, local: str, heir: str) -> None:
        """End a sandbox and have another, which was created for that, under its id.

        The id is the heir's at once, and ``identity`` then says so with the heir's name as its
        handle. On return nothing of the old one runs, unless it hangs in the kernel; what it held
        is freed in the background. No ``SandboxEnded`` is delivered for it. Without the old one the
        heir has its id all the same.

        Raises:
            DsecError: ``not_found`` or ``unavailable`` when the heir has ended; then the old one
                runs on.
        """
        ...

    async def bind(self, spec: SandboxSpec) -> None:
        """Give a sandbox that nothing has run in yet the limits of the one who wants it.

        On return it is what ``create`` would have made of ``spec``; it lives, and its PID 1 does
        not stand still: else ``not_found`` or ``unavailable``. What ``spec`` says of its id, host
        name, layers, classes and ``oom_group`` is as it was made with, else ``invalid``; its run
        directory stays. It is bound once. After a failure it is to be destroyed. Nothing is waited
        for while its disk's limits stay as they are.
        """
        ...

    async def exec(
        self,
        local: str,
        command: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None = None,
        keeper: OutputKeeper | None = None,
    ) -> CommandResult:
        """Run a command and return when its main process has ended.

        Output is always drained, so that a command never blocks on us; ``on_output`` is told of
        each kept piece as it arrives, on the event loop. What a daemon left behind by the command
        writes later is not collected. Cancelling the call kills the whole process tree. ``keeper``
        is told the command's number before it runs, and asked where its output goes when it lasts.
        """
        ...

    def begin(
        self, local: str, command: CommandSpec, keeper: OutputKeeper | None = None
    ) -> asyncio.Future[CommandResult]:
        """Start a command and return at once; otherwise as :meth:`exec`.

        Cancelling what is returned kills the whole process tree.
        """
        ...

    def launch(
        self, local: str, command: CommandSpec, *, spool_fd: int, before: Callable[[int], None]
    ) -> Process:
        """Start a command and return at once; it runs until it ends or is ended.

        ``before`` is told its number before anything of it runs. With ``with_input`` and a
        ``spool_fd`` (-1: none) the end of its input is kept for a later daemon, and with it the
        spool, a file whose position says how much of it the command was given.
        """
        ...

    async def processes(self, local: str) -> list[Process]:
        """Return every command that an earlier daemon started in an adopted sandbox.

        One-shot commands are among them. Those whose output was read are not.
        """
        ...

    def overheard(self, local: str) -> dict[int, CommandResult]:
        """Return the ends of short commands that an earlier daemon was told of and did not hear.

        By the commands' numbers, once, after :meth:`processes`, which does not return them.
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

    async def rename(
        self, local: str, source: str, target: str, *, replace: bool = True, user: str = "0"
    ) -> None:
        """Move a path inside the sandbox, replacing a target file atomically.

        Without ``replace`` an existing target is ``conflict``.
        """
        ...

    async def unlink(self, local: str, path: str, *, user: str = "0") -> None:
        """Remove a file, a link or an empty directory."""
        ...

    async def pause(self, local: str) -> None:
        """Stop every process of the sandbox at once; on return all stand still. Idempotent.

        Time limits of its commands stand still with them. ``destroy`` works on it as on any other.

        Raises:
            DsecError: ``timeout`` when a process is in a call that cannot be interrupted; the
                sandbox then runs on.
        """
        ...

    async def resume(self, local: str) -> None:
        """Let a paused sandbox go on. Idempotent."""
        ...

    async def reclaim(self, local: str) -> None:
        """Give back memory of a paused sandbox: clean pages, and what swap there is takes.

        Whatever cannot be had stays; a sandbox that runs again meanwhile merely reads again.
        Returns when the kernel has done it, which may take a while and holds up nobody.
        """
        ...

    async def usage(self, local: str) -> SandboxUsage:
        """Return what the sandbox uses now."""
        ...

    def network_namespace(self, local: str) -> int:
        """Return a descriptor of the sandbox's network namespace; the caller closes it.

        It belongs to the host: nobody in the sandbox may change it.
        """
        ...

    async def destroy(self, local: str) -> None:
        """End a sandbox: kill, wait until dead, remove its cgroups, free its ids. Idempotent.

        Running ``exec`` calls fail with ``unavailable``. No ``SandboxEnded`` is delivered.
        """
        ...

    def ended(self) -> AsyncIterator[SandboxEnded]:
        """Yield every sandbox that ends without ``destroy``, until ``close``. One reader."""
        ...

    async def close(self, *, keep_sandboxes: bool = False) -> None:
        """Destroy every sandbox, let go of all layers, stop the spawner. Idempotent.

        With ``keep_sandboxes`` they live on without a daemon, for a later one to adopt.
        """
        ...
