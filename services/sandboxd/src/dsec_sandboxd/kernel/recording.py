"""A kernel for tests of the service: the same contract, no Linux, every call written down.

It keeps the contract's states (unknown sandboxes are ``not_found``, a second creation is
``conflict``, a layer must be held), runs no program, and keeps files in memory::

    kernel = RecordingKernel()
    kernel.fail("create", error, nth=2)           # the second creation fails
    kernel.script("/bin/false", result)           # what a program answers
    gate = kernel.hold("exec")                    # exec waits until gate.set()
    kernel.end("a1", EndCause.OOM)                # a sandbox ends by itself
    assert kernel.names() == ["start", "create", "exec"]
"""

from __future__ import annotations

import asyncio
import itertools
import os
import posixpath
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_sandboxd.kernel.file_ports import DirectoryEntry, FileKind, FileStat
from dsec_sandboxd.kernel.interface import (
    CommandResult,
    EndCause,
    KernelFacts,
    OpenMode,
    Orphan,
    SandboxEnded,
    SandboxIdentity,
    SandboxUsage,
    Stream,
)
from dsec_sandboxd.kernel.layer_copies import LayerCopy
from dsec_sandboxd.kernel.recorded_lending import RecordedLending
from dsec_sandboxd.kernel.recorded_process import RecordedCommands, recorded_process, tell_output
from dsec_sandboxd.kernel.recording_files import MemorySandbox, RecordingFiles, empty_copy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from dsec_sandboxd.kernel.interface import CommandSpec, SandboxSpec
    from dsec_sandboxd.kernel.process import OutputKeeper, Process

FACTS = KernelFacts(
    kernel_release="recording",
    cgroup_layout="v2",
    missing=(),
    memory_bytes=16 << 30,
    cpus=8,
    sandboxes_max=1024,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the method's name and its arguments by name."""

    name: str
    arguments: dict[str, Any]


_inodes, _run_ids = itertools.count(1), itertools.count(1)


class _Sandbox:
    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.files: dict[str, int] = {}  # path to a memfd
        self.directories: set[str] = {"/", "/tmp"}  # noqa: S108  a path inside
        self.processes: list[Process] = []
        self.ended = asyncio.Event()
        self.paused = False
        self.identity = SandboxIdentity(
            init_inode=next(_inodes), slot=0, base_id=0, oom_group=spec.oom_group
        )

    def close(self) -> None:
        self.ended.set()
        for process in self.processes:
            process.has_failed(
                DsecError(ErrorCode.UNAVAILABLE, "the sandbox has ended", retryable=False)
            )
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


class RecordingKernel(RecordedLending, RecordedCommands, RecordingFiles):
    """``Kernel`` in memory. Close it: files are descriptors."""

    def __init__(self, facts: KernelFacts = FACTS, leftovers: tuple[str, ...] = ()) -> None:
        self.facts = facts
        self.calls: list[Call] = []
        self.layers: dict[str, Path] = {}
        self._sandboxes: dict[str, _Sandbox] = {}
        self._leftovers, self._closed = list(leftovers), False
        self._failures: dict[str, dict[int, BaseException]] = {}
        self._failing_calls: dict[int, BaseException] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._counts: dict[str, int] = {}
        self._scripts: dict[str, CommandResult | DsecError] = {}
        self._ended: asyncio.Queue[SandboxEnded | None] = asyncio.Queue()
        self.standing_still: set[str] = set()
        self.survivors: dict[str, _Sandbox] = {}
        """Sandboxes without a daemon; hand them to the next kernel, or kill -9 by hand."""

    # -- what a test says and asks

    def fail(self, method: str, error: BaseException, *, nth: int = 1) -> None:
        """Make the n-th call of a method, counted from now, raise."""
        at = self._counts.get(method, 0) + nth
        self._failures.setdefault(method, {})[at] = error

    def fail_call(self, nth: int, error: BaseException) -> None:
        """Make the n-th call of all, whatever it is, counted from now, raise."""
        self._failing_calls[len(self.calls) + nth] = error

    def fail_none(self) -> None:
        """Take back every failure that has not come yet."""
        self._failing_calls.clear()
        self._failures.clear()

    def orphan(self) -> None:
        """Leave the sandboxes in ``survivors``, as a daemon that is killed does."""
        self.survivors, self._sandboxes = self._sandboxes, {}

    def hold(self, method: str) -> asyncio.Event:
        """Make calls of a method wait until the event is set."""
        return self._gates.setdefault(method, asyncio.Event())

    def script(self, program: str, answer: CommandResult | DsecError) -> None:
        """Set what every command with this ``argv[0]`` answers; others exit 0 without output."""
        self._scripts[program] = answer

    def end(self, local: str, cause: EndCause, detail: str = "told by the test") -> None:
        """End a sandbox as if by itself."""
        self._sandboxes.pop(local).close()
        self._ended.put_nowait(SandboxEnded(local=local, cause=cause, detail=detail))

    def names(self) -> list[str]:
        """Return the methods called so far, in order."""
        return [call.name for call in self.calls]

    @property
    def alive(self) -> list[str]:
        """Return the local ids of the living sandboxes, sorted."""
        return sorted(self._sandboxes)

    def is_paused(self, local: str) -> bool:
        """Return whether a living sandbox stands still."""
        return self._require(local).paused

    # -- the contract

    async def start(self) -> KernelFacts:
        """Return the facts it was made with."""
        await self._enter("start")
        return self.facts

    def identity(self, local: str) -> SandboxIdentity:
        """Return an identity that is never given twice."""
        return self._require(local).identity

    async def adopt(
        self, known: Mapping[str, SandboxIdentity], paused: Collection[str] = ()
    ) -> dict[str, str]:
        """Take over what ``survivors`` holds under the same identity."""
        await self._enter("adopt", known=dict(known), paused=set(paused))
        lost = {}
        for local, identity in known.items():
            names = {one.identity.init_inode: name for name, one in self.survivors.items()}
            if identity.init_inode in names:
                self._sandboxes[local] = self.survivors.pop(names[identity.init_inode])
            else:
                lost[local] = "its PID 1 ended while the node's daemon was away"
        return lost

    async def recover(self) -> list[str]:
        """Return the leftovers it was made with, once."""
        await self._enter("recover")
        found, self._leftovers = [*self._leftovers, *self.survivors], []
        for survivor in self.survivors.values():
            survivor.close()
        self.survivors.clear()
        return sorted(found)

    async def hold_layer(self, digest: str, image_path: Path) -> None:
        """Remember a layer."""
        await self._enter("hold_layer", digest=digest, image_path=image_path)
        self.layers[digest] = image_path

    async def release_layer(self, digest: str) -> None:
        """Forget a layer."""
        await self._enter("release_layer", digest=digest)
        self.layers.pop(digest, None)

    async def create(self, spec: SandboxSpec) -> None:
        """Create a sandbox in memory."""
        await self._enter("create", spec=spec)
        if spec.local in self._sandboxes:
            raise DsecError(ErrorCode.CONFLICT, f"the sandbox {spec.local!r} exists already")
        for digest in spec.layers:
            if digest not in self.layers:
                raise DsecError(ErrorCode.LAYER_ERROR, f"the layer {digest} is not held")
        self._sandboxes[spec.local] = _Sandbox(spec)

    async def replace(self, local: str, heir: str) -> None:
        """End a sandbox in memory and give its id to another."""
        await self._enter("replace", local=local, heir=heir)
        new = self._require(heir)
        if local in self._sandboxes:
            self._sandboxes.pop(local).close()
        self._sandboxes[local] = self._sandboxes.pop(heir)
        new.identity = replace(new.identity, handle=heir)

    async def bind(self, spec: SandboxSpec) -> None:
        """Give a sandbox in memory other limits."""
        await self._enter("bind", spec=spec)
        sandbox = self._require(spec.local)
        if sandbox.spec.layers != spec.layers:
            raise DsecError(ErrorCode.INVALID, f"the sandbox {spec.local!r} was not made for this")
        if sandbox.ended.is_set() or spec.local in self.standing_still:
            raise DsecError(ErrorCode.UNAVAILABLE, f"PID 1 of {spec.local!r} stands still")
        sandbox.spec = spec

    async def exec(
        self,
        local: str,
        command: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None = None,
        keeper: OutputKeeper | None = None,
    ) -> CommandResult:
        """Answer what was scripted for the program."""
        sandbox = self._require(local)
        if keeper is not None:
            keeper.asked(next(_run_ids))
        await self._enter("exec", local=local, command=command)
        if sandbox.ended.is_set():
            raise DsecError(ErrorCode.UNAVAILABLE, "the sandbox has ended", retryable=False)
        answer = self._scripts.get(command.argv[0])
        if isinstance(answer, DsecError):
            raise answer
        result = answer or CommandResult(exit_code=0, signal=None, stdout=b"", stderr=b"")
        return tell_output(result, on_output)

    def launch(
        self, local: str, command: CommandSpec, *, spool_fd: int, before: Callable[[int], None]
    ) -> Process:
        """Return a process that prints and ends as scripted; without a script it runs on."""
        sandbox = self._require(local)
        count = self._counts.get("launch", 0) + 1
        self._note("launch", count, {"local": local, "command": command, "spool_fd": spool_fd})
        self._fail("launch", count)
        run_id = next(_run_ids)
        before(run_id)
        process = recorded_process(run_id, command, self._scripts.get(command.argv[0]))
        sandbox.processes.append(process)
        return process

    async def processes(self, local: str) -> list[Process]:
        """Return none: a recorded process ends with its kernel."""
        self._require(local)
        await self._enter("processes", local=local)
        return []

    async def open_file(
        self,
        local: str,
        path: str,
        mode: OpenMode,
        *,
        permissions: int = 0o644,
        user: str = "0",
    ) -> int:
        """Open a file kept in memory."""
        sandbox = self._require(local)
        await self._enter("open_file", local=local, path=path, mode=mode, user=user)
        if path in sandbox.directories:
            raise invalid(f"{path!r} is a directory", reason="is_directory")
        known = path in sandbox.files
        if mode is OpenMode.READ and not known:
            raise not_found(f"{path!r}: No such file or directory", what="path")
        if mode is OpenMode.CREATE and known:
            raise DsecError(ErrorCode.CONFLICT, f"{path!r}: File exists")
        if not known:
            self._require_directory(sandbox, posixpath.dirname(path))
            sandbox.files[path] = os.memfd_create("file", os.MFD_CLOEXEC)
            os.fchmod(sandbox.files[path], permissions)
        flags = {
            OpenMode.READ: os.O_RDONLY,
            OpenMode.WRITE: os.O_WRONLY | os.O_TRUNC,
            OpenMode.APPEND: os.O_WRONLY | os.O_APPEND,
            OpenMode.CREATE: os.O_WRONLY,
        }
        return os.open(f"/proc/self/fd/{sandbox.files[path]}", flags[mode] | os.O_CLOEXEC)

    async def stat(self, local: str, path: str, *, user: str = "0") -> FileStat:
        """Describe a file kept in memory."""
        sandbox = self._require(local)
        await self._enter("stat", local=local, path=path, user=user)
        if path in sandbox.directories:
            kind, size, mode, modified = FileKind.DIRECTORY, 0, 0o755, 0.0
        elif path in sandbox.files:
            status = os.fstat(sandbox.files[path])
            kind, size, modified = FileKind.FILE, status.st_size, status.st_mtime
            mode = status.st_mode & 0o7777
        else:
            raise not_found(f"{path!r}: No such file or directory", what="path")
        return FileStat(
            kind=kind, size_bytes=size, mode=mode, user_id=0, group_id=0, modified_at=modified
        )

    async def list_directory(
        self, local: str, path: str, *, user: str = "0"
    ) -> list[DirectoryEntry]:
        """List names kept in memory."""
        sandbox = self._require(local)
        await self._enter("list_directory", local=local, path=path, user=user)
        self._require_directory(sandbox, path)
        inside = dict.fromkeys(sandbox.files, FileKind.FILE)
        inside |= dict.fromkeys(sandbox.directories - {"/"}, FileKind.DIRECTORY)
        return [
            DirectoryEntry(name=posixpath.basename(name), kind=kind)
            for name, kind in inside.items()
            if posixpath.dirname(name) == path
        ]

    async def make_directory(
        self,
        local: str,
        path: str,
        *,
        parents: bool = False,
        permissions: int = 0o755,
        user: str = "0",
    ) -> None:
        """Remember a directory."""
        sandbox = self._require(local)
        await self._enter(
            "make_directory",
            local=local,
            path=path,
            parents=parents,
            permissions=permissions,
            user=user,
        )
        if path in sandbox.files or (path in sandbox.directories and not parents):
            raise DsecError(ErrorCode.CONFLICT, f"{path!r}: File exists")
        if not parents:
            self._require_directory(sandbox, posixpath.dirname(path))
        while path != "/":
            sandbox.directories.add(path)
            path = posixpath.dirname(path)

    async def rename(
        self, local: str, source: str, target: str, *, replace: bool = True, user: str = "0"
    ) -> None:
        """Move a file kept in memory."""
        sandbox = self._require(local)
        await self._enter("rename", local=local, source=source, target=target, user=user)
        if not replace and (target in sandbox.files or target in sandbox.directories):
            raise DsecError(ErrorCode.CONFLICT, f"{target!r}: File exists")
        if source not in sandbox.files:
            raise not_found(f"{source!r}: No such file or directory", what="path")
        replaced = sandbox.files.pop(target, None)
        if replaced is not None:
            os.close(replaced)
        sandbox.files[target] = sandbox.files.pop(source)

    async def unlink(self, local: str, path: str, *, user: str = "0") -> None:
        """Forget a file or a directory."""
        sandbox = self._require(local)
        await self._enter("unlink", local=local, path=path, user=user)
        if path in sandbox.directories:
            sandbox.directories.discard(path)
        elif path in sandbox.files:
            os.close(sandbox.files.pop(path))
        else:
            raise not_found(f"{path!r}: No such file or directory", what="path")

    async def pause(self, local: str) -> None:
        """Note that a sandbox stands still."""
        sandbox = self._require(local)
        await self._enter("pause", local=local)
        sandbox.paused = True

    async def resume(self, local: str) -> None:
        """Note that a sandbox goes on."""
        sandbox = self._require(local)
        await self._enter("resume", local=local)
        sandbox.paused = False

    async def reclaim(self, local: str) -> None:
        """Do nothing: there is no memory to give back."""
        self._require(local)
        await self._enter("reclaim", local=local)

    async def snapshot(
        self, local: str, *, fold: Sequence[str] = (), size_bytes: int, inodes: int
    ) -> LayerCopy:
        """Return an empty directory as the copy."""
        self._require(local)
        await self._enter("snapshot", local=local, fold=fold, size_bytes=size_bytes, inodes=inodes)
        return empty_copy()

    async def fold(self, layers: Sequence[str], *, size_bytes: int, inodes: int) -> LayerCopy:
        """Return an empty directory as the copy."""
        await self._enter("fold", layers=layers, size_bytes=size_bytes, inodes=inodes)
        return empty_copy()

    async def hold_mount(self, digest: str, mount_fd: int) -> None:
        """Remember a layer."""
        await self._enter("hold_mount", digest=digest, mount_fd=mount_fd)
        self.layers[digest] = Path("mount")

    async def usage(self, local: str) -> SandboxUsage:
        """Return a small constant usage."""
        self._require(local)
        await self._enter("usage", local=local)
        return SandboxUsage(memory_bytes=1 << 20, memory_peak_bytes=2 << 20, cpu_s=0.01, pids=1)

    def network_namespace(self, local: str) -> int:
        """Return this process's own namespace: what listens in a test listens in the sandbox."""
        self._require(local)
        return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    async def destroy(self, local: str) -> None:
        """Forget a sandbox. Idempotent."""
        await self._enter("destroy", local=local)
        sandbox = self._sandboxes.pop(local, None)
        if sandbox is not None:
            sandbox.close()

    async def ended(self) -> AsyncIterator[SandboxEnded]:
        """Yield what ``end`` was told, until ``close``."""
        while (event := await self._ended.get()) is not None:
            yield event

    async def reconcile(self, is_held: Callable[[str], bool]) -> list[Orphan]:
        """Forget the layers that nobody holds, and the leftovers."""
        await self._enter("reconcile")
        found = [Orphan("cgroup", local) for local in self._leftovers]
        self._leftovers = []
        for digest in sorted(it for it in self.layers if not is_held(it)):
            del self.layers[digest]
            found.append(Orphan("layer", digest))
        return found

    async def close(self, *, keep_sandboxes: bool = False) -> None:
        """Forget everything, or leave the sandboxes in ``survivors``. Idempotent."""
        await self._enter("close", keep_sandboxes=keep_sandboxes)
        if keep_sandboxes:
            self.orphan()
        for sandbox in self._sandboxes.values():
            sandbox.close()
        self._sandboxes.clear()
        self.layers.clear()
        if not self._closed:
            self._closed = True
            self._ended.put_nowait(None)

    def memory(self, local: str) -> MemorySandbox:
        """Return a sandbox's files."""
        return self._require(local)

    async def enter(self, name: str, **arguments: Any) -> None:
        """Write a call down; wait or fail as the test says."""
        await self._enter(name, **arguments)

    async def _enter(self, name: str, **arguments: Any) -> None:
        count = self._counts.get(name, 0) + 1
        self._note(name, count, arguments)
        if name in self._gates:
            await self._gates[name].wait()
        self._fail(name, count)

    def _note(self, name: str, count: int, arguments: dict[str, Any]) -> None:
        self.calls.append(Call(name, arguments))
        self._counts[name] = count

    def _fail(self, name: str, count: int) -> None:
        failure = self._failures.get(name, {}).pop(count, None)
        failure = self._failing_calls.pop(len(self.calls), None) or failure
        if failure is not None:
            raise failure

    def _require(self, local: str) -> _Sandbox:
        sandbox = self._sandboxes.get(local)
        if sandbox is None:
            raise not_found(f"there is no sandbox {local!r} on this node", what="sandbox")
        return sandbox

    @staticmethod
    def _require_directory(sandbox: _Sandbox, path: str) -> None:
        if path not in sandbox.directories:
            raise not_found(f"{path!r}: No such file or directory", what="path")
