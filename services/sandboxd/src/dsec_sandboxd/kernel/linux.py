"""The real kernel: sandboxes made by the spawner, limited by cgroups, served by their PID 1."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_common.errors import (
    DsecError,
    ErrorCode,
    not_found,
    unavailable,
)
from dsec_sandboxd.kernel.cgroups import detect_layout, open_driver
from dsec_sandboxd.kernel.cgroups_tree import lock_node
from dsec_sandboxd.kernel.command import out_of_descriptors
from dsec_sandboxd.kernel.init import ended_error
from dsec_sandboxd.kernel.interface import EndCause, SandboxEnded, SandboxUsage
from dsec_sandboxd.kernel.layer_table import LayerTable
from dsec_sandboxd.kernel.mounts import clone_read_only
from dsec_sandboxd.kernel.probe import read_facts, require_host
from dsec_sandboxd.kernel.protocol import (
    CREATE_HAS_RUN_MOUNT,
    SpawnerKind,
    SpawnerRequest,
)
from dsec_sandboxd.kernel.sandbox import Sandbox
from dsec_sandboxd.kernel.slots import SlotPool
from dsec_sandboxd.kernel.spawner import Spawner, creation_error, exit_signal, readable
from dsec_sandboxd.kernel.specification import check_spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from dsec_sandboxd.kernel.cgroups import Cgroup, CgroupDriver, CgroupLimits
    from dsec_sandboxd.kernel.interface import (
        CommandResult,
        CommandSpec,
        DirectoryEntry,
        FileStat,
        KernelFacts,
        OpenMode,
        SandboxSpec,
        Stream,
    )
    from dsec_sandboxd.kernel.spawner import Answer

PROGRAMS: Final = Path(__file__).parent.parent / "native" / "bin"
_READY_TIMEOUT_S: Final = 10.0
_DEATH_TIMEOUT_S: Final = 10.0
#: How many slots have their namespaces before a sandbox asks for them.
_WARM_SLOTS: Final = 8


@dataclass(slots=True)
class _Birth:
    """What a creation holds until it is a sandbox, or has to be undone."""

    slot: int
    cgroup: Cgroup | None = None
    answer: asyncio.Future[Answer] | None = None
    sandbox: Sandbox | None = None


class LinuxKernel:
    """``Kernel`` on Linux 6.13 or later, as root. See the interface for what each method promises.

    Args:
        node: names the cgroup directories ``dsec-<node>``; one daemon per name and host.
        programs: the folder with the built ``spawner`` and ``pid1``.
    """

    def __init__(self, node: str, programs: Path = PROGRAMS) -> None:
        self._node = node
        self._programs = programs
        self._spawner: Spawner | None = None
        self._spawner_lock = asyncio.Lock()
        self._layers = LayerTable()
        self._sandboxes: dict[str, Sandbox] = {}
        self._births: dict[str, asyncio.Future[None]] = {}
        self._ended: asyncio.Queue[SandboxEnded | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots: SlotPool | None = None
        self._driver: CgroupDriver | None = None
        self._node_lock = -1
        self._warm = 0
        self._closed = False

    # -- life cycle

    async def start(self) -> KernelFacts:
        """Start the spawner, probe the host and return what it can enforce."""
        require_host()
        layout = detect_layout()
        facts = read_facts(layout)
        self._node_lock = lock_node(layout, self._node)
        try:
            self._driver = open_driver(layout, self._node)
            self._slots = SlotPool()
            await self._living_spawner()
            await self._warm_slots()
        except BaseException:
            await self.close()
            raise
        asyncio.get_running_loop().add_reader(self._driver.oom_fileno(), self._read_ooms)
        return facts

    async def recover(self) -> list[str]:
        """Remove what an earlier daemon of this node left; return the local ids found."""
        driver = self._require_driver()
        found = [local for local in driver.leftovers() if local not in self._sandboxes]
        cgroups = [driver.adopt(local) for local in found]
        for cgroup in cgroups:
            cgroup.kill()
        for cgroup in cgroups:
            await cgroup.remove_when_empty()
        return found

    async def close(self) -> None:
        """Destroy every sandbox, let go of all layers, stop the spawner. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._births:
            await asyncio.wait(self._births.values())
        await asyncio.gather(*(self.destroy(local) for local in list(self._sandboxes)))
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._spawner is not None:
            await self._spawner.stop()
        if self._slots is not None:
            self._slots.close()
        if self._driver is not None:
            asyncio.get_running_loop().remove_reader(self._driver.oom_fileno())
            self._driver.close()
        if self._node_lock >= 0:
            os.close(self._node_lock)
            self._node_lock = -1
        self._ended.put_nowait(None)

    async def ended(self) -> AsyncIterator[SandboxEnded]:
        """Yield every sandbox that ends without ``destroy``, until ``close``. One reader."""
        while (event := await self._ended.get()) is not None:
            yield event

    # -- layers

    async def hold_layer(self, digest: str, image_path: Path) -> None:
        """Mount an EROFS image once, for all sandboxes. Idempotent."""
        await self._layers.hold(await self._living_spawner(), digest, image_path)

    async def release_layer(self, digest: str) -> None:
        """Let go of a layer. Idempotent; living sandboxes keep what they use."""
        await self._layers.release(self._spawner, digest)

    # -- sandboxes

    async def create(self, spec: SandboxSpec) -> None:
        """Create a sandbox; on return its PID 1 runs and ``exec`` works."""
        if self._closed:
            raise unavailable("the kernel is closed: no sandbox can be created any more")
        limits = check_spec(spec)
        handles = [self._layers.handle(digest) for digest in spec.layers]
        if spec.local in self._sandboxes or spec.local in self._births:
            raise DsecError(ErrorCode.CONFLICT, f"the sandbox {spec.local!r} exists already")
        slots = self._require_slots()
        done = self._births[spec.local] = asyncio.get_running_loop().create_future()
        birth = _Birth(-1)
        try:
            spawner = await self._living_spawner()
            birth.slot = slots.take()
            await self._give_birth(spec, limits, handles, spawner, birth)
        except BaseException:
            await asyncio.shield(self._spawn_task(self._undo(birth)))
            raise
        finally:
            del self._births[spec.local]
            done.set_result(None)
        if birth.slot + _WARM_SLOTS // 2 > self._warm:
            self._spawn_task(self._warm_slots())

    async def _give_birth(
        self,
        spec: SandboxSpec,
        limits: CgroupLimits,
        handles: list[int],
        spawner: Spawner,
        birth: _Birth,
    ) -> None:
        base_id = self._require_slots().base_id(birth.slot)
        cgroup = birth.cgroup = self._require_driver().create(spec.local, limits)
        descriptors = [cgroup.unified_directory_fd, *cgroup.enter_fds]
        run_fd = -1 if spec.run_directory is None else clone_read_only(spec.run_directory)
        try:
            request = SpawnerRequest(
                kind=SpawnerKind.CREATE,
                slot=birth.slot,
                base_id=base_id,
                layers=handles,
                controllers=len(cgroup.enter_fds),
                flags=CREATE_HAS_RUN_MOUNT if run_fd >= 0 else 0,
                disk_bytes=spec.disk_bytes,
                inodes=spec.inodes,
                hostname=spec.hostname,
            )
            birth.answer = spawner.send(
                request, [*descriptors, run_fd][: len(descriptors) + (run_fd >= 0)]
            )
        finally:
            if run_fd >= 0:
                os.close(run_fd)
        # While the spawner works:
        cgroup.close_descriptors()
        cgroup.delegate_exec(base_id)
        reply, received = await asyncio.shield(birth.answer)
        if reply.error:
            raise creation_error(reply.step, reply.error)
        if len(received) != 2:  # noqa: PLR2004  pidfd and control socket
            raise out_of_descriptors()
        pidfd, control_fd = received
        sandbox = birth.sandbox = Sandbox(
            spec.local,
            birth.slot,
            cgroup,
            pidfd=pidfd,
            control_fd=control_fd,
            on_end=lambda: self._on_init_end(spec.local),
        )
        sandbox.prepare_directory()
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await sandbox.init.ready
        except TimeoutError as error:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"PID 1 of {spec.local!r} did not start within {_READY_TIMEOUT_S} s",
            ) from error
        if not sandbox.init.alive:  # it ended as soon as it was ready
            raise ended_error()
        self._sandboxes[spec.local] = sandbox

    async def _undo(self, birth: _Birth) -> None:
        """Leave nothing of a creation that failed or was cancelled."""
        sandbox = birth.sandbox
        if birth.answer is not None and sandbox is None:
            with contextlib.suppress(DsecError):
                _, received = await birth.answer
                for descriptor in received:
                    os.close(descriptor)
        if sandbox is not None:
            await _bury(sandbox)
        elif birth.cgroup is not None:
            birth.cgroup.kill()
            await birth.cgroup.remove_when_empty()
        if birth.slot >= 0:
            await self._release_slot(birth.slot)

    async def destroy(self, local: str) -> None:
        """End a sandbox: kill, wait until dead, remove its cgroups, free its ids. Idempotent."""
        sandbox = self._sandboxes.get(local)
        if sandbox is not None:
            await asyncio.shield(self._end(sandbox))

    def _end(self, sandbox: Sandbox) -> asyncio.Task[None]:
        if sandbox.ending is None:
            sandbox.ending = self._spawn_task(self._finish(sandbox))
        return sandbox.ending

    async def _finish(self, sandbox: Sandbox) -> None:
        try:
            await _bury(sandbox)
        except DsecError:
            sandbox.ending = None  # the next destroy tries again
            raise
        await self._release_slot(sandbox.slot)
        del self._sandboxes[sandbox.local]

    async def _release_slot(self, slot: int) -> None:
        if self._spawner is not None and self._spawner.alive:
            with contextlib.suppress(DsecError):  # a dead spawner holds nothing
                await self._spawner.request(SpawnerRequest(kind=SpawnerKind.RELEASE, slot=slot))
        self._require_slots().give_back(slot)

    def _on_init_end(self, local: str) -> None:
        sandbox = self._sandboxes.get(local)
        if sandbox is not None and sandbox.ending is None:
            sandbox.ending = self._spawn_task(self._report_end(sandbox))

    async def _report_end(self, sandbox: Sandbox) -> None:
        await readable(sandbox.pidfd)
        self._read_ooms()
        number = exit_signal(sandbox.pidfd)
        if sandbox.oom_notices and number is not None:
            cause, detail = EndCause.OOM, "its memory limit was reached and its PID 1 was killed"
        elif number is not None:
            cause, detail = EndCause.KILLED, f"its PID 1 was killed by signal {number} from outside"
        else:
            cause, detail = EndCause.EXITED, "its PID 1 ended"
        with contextlib.suppress(DsecError):  # what is left, a destroy will remove
            await self._finish(sandbox)
        self._ended.put_nowait(SandboxEnded(local=sandbox.local, cause=cause, detail=detail))

    # -- inside a sandbox

    async def exec(
        self,
        local: str,
        command: CommandSpec,
        on_output: Callable[[Stream, bytes], None] | None = None,
    ) -> CommandResult:
        """Run a command and return when its main process has ended."""
        return await self._require(local).exec(command, on_output, self._read_ooms)

    async def open_file(
        self,
        local: str,
        path: str,
        mode: OpenMode,
        *,
        permissions: int = 0o644,
        user: str = "0",
    ) -> int:
        """Open a regular file inside the sandbox; the caller closes the descriptor."""
        return await self._require(local).open_file(path, mode, permissions, user)

    async def stat(self, local: str, path: str, *, user: str = "0") -> FileStat:
        """Describe a path without following a last link."""
        return await self._require(local).stat(path, user)

    async def list_directory(
        self, local: str, path: str, *, user: str = "0"
    ) -> list[DirectoryEntry]:
        """List a directory, unsorted; at most 10,000 names."""
        return await self._require(local).list_directory(path, user)

    async def make_directory(
        self,
        local: str,
        path: str,
        *,
        parents: bool = False,
        permissions: int = 0o755,
        user: str = "0",
    ) -> None:
        """Create a directory; with ``parents`` also those above it."""
        sandbox = self._require(local)
        await sandbox.make_directory(path, parents=parents, permissions=permissions, user=user)

    async def rename(self, local: str, source: str, target: str, *, user: str = "0") -> None:
        """Move a path inside the sandbox."""
        await self._require(local).rename(source, target, user)

    async def unlink(self, local: str, path: str, *, user: str = "0") -> None:
        """Remove a file, a link or an empty directory."""
        await self._require(local).unlink(path, user)

    async def usage(self, local: str) -> SandboxUsage:
        """Return what the sandbox uses now."""
        cgroup = self._require(local).cgroup
        return SandboxUsage(
            memory_bytes=cgroup.memory_bytes_current(),
            memory_peak_bytes=cgroup.memory_bytes_peak(),
            cpu_s=cgroup.cpu_usage_s(),
            pids=cgroup.pids_current(),
        )

    # -- parts

    async def _living_spawner(self) -> Spawner:
        """Return the spawner; a dead one is replaced, and its layers are mounted again."""
        if self._spawner is not None and self._spawner.alive:
            return self._spawner
        async with self._spawner_lock:
            if self._spawner is not None and self._spawner.alive:
                return self._spawner
            if self._spawner is not None:
                await self._spawner.stop()
            spawner = await Spawner.start(self._programs / "spawner", self._programs / "pid1")
            self._spawner = spawner
            self._warm = 0
            await self._layers.mount_again(spawner)
            return spawner

    async def _warm_slots(self) -> None:
        """Keep a few slots ahead of the living sandboxes ready."""
        slots, spawner = self._require_slots(), self._spawner
        wanted = len(self._sandboxes) + _WARM_SLOTS
        with contextlib.suppress(DsecError):  # creation makes what is missing, and reports
            while spawner is not None and self._warm < wanted:
                slot, self._warm = self._warm, self._warm + 1
                await spawner.request(
                    SpawnerRequest(kind=SpawnerKind.WARM, slot=slot, base_id=slots.base_id(slot))
                )

    def _read_ooms(self) -> None:
        for local in self._require_driver().read_ooms():
            if local in self._sandboxes:
                self._sandboxes[local].oom_notices += 1

    def _spawn_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _require(self, local: str) -> Sandbox:
        sandbox = self._sandboxes.get(local)
        if sandbox is None:
            raise not_found(f"there is no sandbox {local!r} on this node", what="sandbox")
        return sandbox

    def _require_driver(self) -> CgroupDriver:
        if self._driver is None:
            raise DsecError(ErrorCode.INTERNAL, "the kernel was not started: call start() first")
        return self._driver

    def _require_slots(self) -> SlotPool:
        if self._slots is None:
            raise DsecError(ErrorCode.INTERNAL, "the kernel was not started: call start() first")
        return self._slots


async def _bury(sandbox: Sandbox) -> None:
    """Kill a sandbox; on return it has no process, no cgroup and no descriptor."""
    sandbox.cgroup.kill()
    sandbox.init.close()
    if sandbox.pidfd >= 0:
        try:
            async with asyncio.timeout(_DEATH_TIMEOUT_S):
                await readable(sandbox.pidfd)
        except TimeoutError as error:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"the processes of {sandbox.local!r} did not die within {_DEATH_TIMEOUT_S} s: "
                "one hangs in the kernel; try again",
            ) from error
    sandbox.close()
    await sandbox.cgroup.remove_when_empty()
