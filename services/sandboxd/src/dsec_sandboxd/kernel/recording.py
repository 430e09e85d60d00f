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
import os
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found
from dsec_sandboxd.kernel.interface import (
    CommandResult,
    DirectoryEntry,
    EndCause,
    FileKind,
    FileStat,
    KernelFacts,
    OpenMode,
    SandboxEnded,
    SandboxUsage,
    Stream,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dsec_sandboxd.kernel.interface import CommandSpec, SandboxSpec

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


class _Sandbox:
    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.files: dict[str, int] = {}  # path to a memfd
        self.directories: set[str] = {"/", "/tmp"}  # noqa: S108  a path inside
        self.ended = asyncio.Event()

    def close(self) -> None:
        self.ended.set()
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


class RecordingKernel:
    """``Kernel`` in memory. Close it: files are descriptors."""

    def __init__(self, facts: KernelFacts = FACTS, leftovers: tuple[str, ...] = ()) -> None:
        self.facts = facts
        self.calls: list[Call] = []
        self.layers: dict[str, Path] = {}
        self._sandboxes: dict[str, _Sandbox] = {}
        self._leftovers = list(leftovers)
        self._failures: dict[str, dict[int, BaseException]] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._counts: dict[str, int] = {}
        self._scripts: dict[str, CommandResult | DsecError] = {}
        self._ended: asyncio.Queue[SandboxEnded | None] = asyncio.Queue()
        self._closed = False

    # -- what a test says and asks

    def fail(self, method: str, error: BaseException, *, nth: int = 1) -> None:
        """Make the n-th call of a method, counted from now, raise."""
        at = self._counts.get(method, 0) + nth
        self._failures.setdefault(method, {})[at] = error

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

    # -- the contract

    async def start(self) -> KernelFacts:
        """Return the facts it was made with."""
        await self._enter("start")
        return self.facts

    async def recover(self) -> list[str]:
        """Return the leftovers it was made with, once."""
        await self._enter("recover")
        found, self._leftovers = self._leftovers, []
        return found

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

    async def exec(
        self,
        local: str,
        command: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None = None,
    ) -> CommandResult:
        """Answer what was scripted for the program."""
        sandbox = self._require(local)
        await self._enter("exec", local=local, command=command)
        if sandbox.ended.is_set():
            raise DsecError(ErrorCode.UNAVAILABLE, "the sandbox has ended", retryable=False)
        answer = self._scripts.get(command.argv[0])
        if isinstance(answer, DsecError):
            raise answer
        result = answer or CommandResult(exit_code=0, signal=None, stdout=b"", stderr=b"")
        if on_output is not None:
            for stream, data in ((Stream.STDOUT, result.stdout), (Stream.STDERR, result.stderr)):
                if data:
                    on_output(stream, data)
        return result

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

    async def rename(self, local: str, source: str, target: str, *, user: str = "0") -> None:
        """Move a file kept in memory."""
        sandbox = self._require(local)
        await self._enter("rename", local=local, source=source, target=target, user=user)
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

    async def usage(self, local: str) -> SandboxUsage:
        """Return a small constant usage."""
        self._require(local)
        await self._enter("usage", local=local)
        return SandboxUsage(memory_bytes=1 << 20, memory_peak_bytes=2 << 20, cpu_s=0.01, pids=1)

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

    async def close(self) -> None:
        """Forget everything. Idempotent."""
        await self._enter("close")
        for sandbox in self._sandboxes.values():
            sandbox.close()
        self._sandboxes.clear()
        self.layers.clear()
        if not self._closed:
            self._closed = True
            self._ended.put_nowait(None)

    async def _enter(self, name: str, **arguments: Any) -> None:
        self.calls.append(Call(name, arguments))
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if name in self._gates:
            await self._gates[name].wait()
        failure = self._failures.get(name, {}).pop(count, None)
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
