"""The real kernel: sandboxes made by the spawner, limited by cgroups, served by their PID 1."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from dsec_common.errors import (
    DsecError,
    ErrorCode,
    not_found,
    unavailable,
)
from dsec_sandboxd.kernel.adoption import adopt_sandbox, hand_over, identity_of
from dsec_sandboxd.kernel.binding import Binding
from dsec_sandboxd.kernel.cgroups import detect_layout, open_driver
from dsec_sandboxd.kernel.cgroups_tree import lock_node
from dsec_sandboxd.kernel.command import out_of_descriptors
from dsec_sandboxd.kernel.host_limits import raise_host_limits
from dsec_sandboxd.kernel.init import ended_error
from dsec_sandboxd.kernel.inside import Inside
from dsec_sandboxd.kernel.interface import EndCause, Orphan, SandboxEnded
from dsec_sandboxd.kernel.layer_table import LayerTable
from dsec_sandboxd.kernel.lender import Lender
from dsec_sandboxd.kernel.mounts import extra_mounts
from dsec_sandboxd.kernel.network_namespace import NetworkNamespaces
from dsec_sandboxd.kernel.probe import read_facts, require_host
from dsec_sandboxd.kernel.protocol import (
    SpawnerKind,
    SpawnerRequest,
)
from dsec_sandboxd.kernel.reconciler import remove_cgroups
from dsec_sandboxd.kernel.replacing import Replacing
from dsec_sandboxd.kernel.sandbox import Sandbox
from dsec_sandboxd.kernel.slots import SlotPool
from dsec_sandboxd.kernel.snapshots import Copying
from dsec_sandboxd.kernel.spare_descriptor import SpareDescriptor
from dsec_sandboxd.kernel.spawner import Spawner, birth_error, exit_signal, readable
from dsec_sandboxd.kernel.specification import check_spec, create_flags, device_texts
from dsec_sandboxd.kernel.watching import Watching

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping

    from dsec_sandboxd.kernel.cgroups import Cgroup, CgroupDriver, CgroupLimits
    from dsec_sandboxd.kernel.interface import (
        KernelFacts,
        SandboxIdentity,
        SandboxSpec,
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


class LinuxKernel(Watching, Inside, Copying, Binding, Replacing, NetworkNamespaces, Lender):
    """``Kernel`` on Linux 6.13 or later, as root. See the interface for what each method promises.

    Args:
        node: names the cgroup directories ``dsec-<node>``; one daemon per name and host.
        programs: the folder with the built ``spawner`` and ``pid1``.
    """

    def __init__(self, node: str, programs: Path = PROGRAMS) -> None:
        super().__init__()
        self._node = node
        self._programs = programs
        self._spawner: Spawner | None = None
        self._spawner_lock = asyncio.Lock()
        self._layers = LayerTable()
        self._sandboxes: dict[str, Sandbox] = {}
        self._births: dict[str, asyncio.Future[None]] = {}
        self._bound: dict[str, str] = {}  # what was made anew: its cgroup's name to its id
        self._birth_slots: set[int] = set()
        self._ended: asyncio.Queue[SandboxEnded | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots: SlotPool | None = None
        self._driver: CgroupDriver | None = None
        self._node_lock = -1
        self._warm = 0
        self._missing: tuple[str, ...] = ()
        self._spare = SpareDescriptor()
        self._copying = WeakKeyDictionary()
        self._copies = set()
        self._closed = False

    # -- life cycle

    async def start(self) -> KernelFacts:
        """Start the spawner, probe the host and return what it can enforce."""
        require_host()
        layout = detect_layout()
        facts = read_facts(layout)
        facts = replace(facts, missing=(*facts.missing, *raise_host_limits()))
        self._missing = facts.missing
        self._node_lock = lock_node(layout, self._node)
        try:
            self._driver = open_driver(layout, self._node)
            self._slots = SlotPool(self._node, layout.unified)
            await self._living_spawner()
            await self._warm_slots()
        except BaseException:
            await self.close()
            raise
        return replace(facts, missing=(*facts.missing, *self._begin_watching()))

    def identity(self, local: str) -> SandboxIdentity:
        """Return by what a later daemon recognises a sandbox."""
        return identity_of(self._require(local), self._require_slots())

    async def adopt(
        self, known: Mapping[str, SandboxIdentity], paused: Collection[str] = ()
    ) -> dict[str, str]:
        """Take over sandboxes of an earlier daemon; return why the others are lost."""
        lost: dict[str, str] = {}
        for local, identity in known.items():
            ended = partial(self._on_init_end, local)
            try:
                sandbox = adopt_sandbox(
                    local,
                    identity,
                    self._require_driver(),
                    self._require_slots(),
                    ended,
                    paused=local in paused,
                )
            except DsecError as error:
                lost[local] = error.message
                continue
            self._sandboxes[local] = sandbox
            if identity.handle:
                self._bound[identity.handle] = local
            await self._hand_over(await self._living_spawner(), sandbox)
        return lost

    async def _hand_over(self, spawner: Spawner, sandbox: Sandbox) -> None:
        with contextlib.suppress(DsecError):  # it lives all the same, or its end is on the way
            await hand_over(spawner, sandbox, self._require_slots())

    async def recover(self) -> list[str]:
        """Remove what an earlier daemon of this node left; return the local ids found."""
        removed = await remove_cgroups(self._require_driver(), self._is_owned)
        return [orphan.name for orphan in removed if orphan.kind == "cgroup"]

    async def reconcile(self, is_held: Callable[[str], bool]) -> list[Orphan]:
        """Remove all of this node in the kernel that belongs to nobody; return what was found."""
        found = await remove_cgroups(self._require_driver(), self._is_owned)
        slots = self._require_slots()
        owned = {sandbox.slot for sandbox in self._sandboxes.values()} | self._birth_slots
        for slot in slots.taken() - owned:
            await self._release_slot(slot)
            found.append(Orphan("writable_layer", str(slot)))
        for digest in self._layers.digests():
            if await self._layers.release(digest, unless=is_held):
                found.append(Orphan("layer", digest))
        return found

    def _is_owned(self, cgroup: str) -> bool:
        sandbox = self._sandboxes.get(cgroup)
        owned = cgroup in self._births or cgroup in self._bound
        # One that was made anew has its id, but no longer the cgroups of that name.
        return owned or (sandbox is not None and sandbox.cgroup.local == cgroup)

    async def close(self, *, keep_sandboxes: bool = False) -> None:
        """Destroy every sandbox, or let it live on; let go of all layers, stop the spawner."""
        if self._closed:
            return
        self._closed = True
        if self._births:
            await asyncio.wait(self._births.values())
        if not keep_sandboxes:
            await asyncio.gather(*(self.destroy(local) for local in list(self._sandboxes)))
        while self._tasks or self._copies:
            await asyncio.wait(self._tasks | self._copies)
        for sandbox in self._sandboxes.values():
            sandbox.close()
        self._sandboxes.clear()
        self._layers.close()
        if self._spawner is not None:
            await self._spawner.stop()
        if self._slots is not None:
            self._slots.close()
        await self._stop_watching()
        if self._node_lock >= 0:
            os.close(self._node_lock)
            self._node_lock = -1
        self._spare.close()
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
        await self._layers.release(digest)

    # -- sandboxes

    async def create(self, spec: SandboxSpec) -> None:
        """Create a sandbox; on return its PID 1 runs and ``exec`` works."""
        if self._closed:
            raise unavailable("the kernel is closed: no sandbox can be created any more")
        limits = check_spec(spec, self._missing)
        handles = [self._layers.handle(digest) for digest in spec.layers]
        if spec.local in self._sandboxes or spec.local in self._births:
            raise DsecError(ErrorCode.CONFLICT, f"the sandbox {spec.local!r} exists already")
        slots = self._require_slots()
        self._spare.require()
        done = self._births[spec.local] = asyncio.get_running_loop().create_future()
        birth = _Birth(-1)
        try:
            spawner = await self._living_spawner()
            birth.slot = slots.take()
            self._birth_slots.add(birth.slot)
            await self._give_birth(spec, limits, handles, spawner, birth)
        except BaseException:
            await asyncio.shield(self._spawn_task(self._undo(birth)))
            raise
        finally:
            del self._births[spec.local]
            self._birth_slots.discard(birth.slot)
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
        driver = self._require_driver()
        cgroup = birth.cgroup = driver.adopt(spec.local)
        texts = [*driver.limit_texts(limits), *device_texts(spec.devices)]
        parents = driver.parent_fds()
        extra = extra_mounts(spec.run_directory, spec.mps_pipes)
        try:
            request = SpawnerRequest(
                kind=SpawnerKind.CREATE,
                slot=birth.slot,
                base_id=base_id,
                layers=handles,
                controllers=len(parents) - 1,
                flags=create_flags(spec, has_run_mount=bool(extra)),
                disk_bytes=spec.disk_bytes,
                inodes=spec.inodes,
                hostname=spec.hostname,
                cgroup=spec.local,
                limit_texts=texts,
            )
            birth.answer = spawner.send(request, [*parents, *extra])
        finally:
            for descriptor in extra:
                os.close(descriptor)
        reply, received = await asyncio.shield(birth.answer)
        if reply.error:
            if reply.left_no_cgroups:
                birth.cgroup = None  # what has that name, if anything, is another's
            raise birth_error(reply, cgroup, texts)
        if len(received) != 2:  # noqa: PLR2004  pidfd and control socket
            raise out_of_descriptors()
        pidfd, control_fd = received
        sandbox = birth.sandbox = Sandbox(
            spec.local,
            birth.slot,
            cgroup,
            pidfd=pidfd,
            control_fd=control_fd,
            on_end=lambda: self._on_init_end(sandbox.local),
        )
        # While PID 1 starts:
        cgroup.watch_oom(end_all=limits.end_all_on_oom)
        cgroup.delegate_exec(base_id)
        sandbox.spec, sandbox.oom_group = spec, spec.oom_group
        if len(self._births) == 1:  # with others on the way there is better to do
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
        if spawner is not self._spawner:  # another one has taken its place and lacks this sandbox
            await self._hand_over(await self._living_spawner(), sandbox)

    async def _undo(self, birth: _Birth) -> None:
        """Leave nothing of a creation that failed or was cancelled."""
        sandbox = birth.sandbox
        if birth.answer is not None and sandbox is None:
            with contextlib.suppress(DsecError):
                _, received = await birth.answer
                for descriptor in received:
                    os.close(descriptor)
        if sandbox is not None:
            with self._spare.given_up():
                await _bury(sandbox)
        elif birth.cgroup is not None:
            with self._spare.given_up():
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
            with self._spare.given_up():
                await _bury(sandbox)
        except DsecError:
            sandbox.ending = None  # the next destroy tries again
            raise
        await self._release_slot(sandbox.slot)
        self._bound.pop(sandbox.cgroup.local, None)
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
        number = await exit_signal(sandbox.pidfd)
        if sandbox.hoarded:
            cause, detail = EndCause.EXHAUSTED, sandbox.hoarded
        elif sandbox.oom_notices and number is not None:
            cause, detail = EndCause.OOM, sandbox.oom_victims.say(end_all=sandbox.oom_group)
        elif number is not None:
            cause, detail = EndCause.KILLED, f"its PID 1 was killed by signal {number} from outside"
        else:
            cause, detail = EndCause.EXITED, "its PID 1 ended"
        with contextlib.suppress(DsecError):  # what is left, a destroy will remove
            await self._finish(sandbox)
        self._ended.put_nowait(SandboxEnded(local=sandbox.local, cause=cause, detail=detail))

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
            try:
                await self._tell_all(spawner)
            except BaseException:
                await spawner.stop()
                raise
            self._spawner = spawner  # not before: nobody may ask it for what it does not have yet
            self._warm = 0
            return spawner

    async def _tell_all(self, spawner: Spawner) -> None:
        """Give a new spawner every layer and every sandbox, as they come and go meanwhile."""
        await self._layers.mount_again(spawner)
        told: dict[str, Sandbox] = {}
        while True:
            living = self._sandboxes
            come = [one for local, one in living.items() if told.get(local) is not one]
            gone = [one for local, one in told.items() if living.get(local) is not one]
            if not come and not gone:
                return
            for sandbox in gone:
                del told[sandbox.local]
                request = SpawnerRequest(kind=SpawnerKind.RELEASE, slot=sandbox.slot)
                with contextlib.suppress(DsecError):  # it may never have been given
                    await spawner.request(request)
            for sandbox in come:
                told[sandbox.local] = sandbox
                await self._hand_over(spawner, sandbox)

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

    def _base_id(self, slot: int) -> int:
        return self._require_slots().base_id(slot)

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
