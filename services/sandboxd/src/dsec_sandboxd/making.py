"""Making one sandbox and taking it apart again: what it holds, in which order.

Taken in this order, each let go of by :meth:`Maker.let_go` or, after a crash of the daemon, by the
next one's recovery:

1. a user of each layer (in this process only);
2. the run directory, on a tmpfs (:meth:`RunDirectory.open`);
3. the sandbox in the kernel (``kernel.destroy``; ``kernel.recover``);
4. the agent's socket in the run directory (with it).

The intent was written to the StateDB before the first of them, so whatever line a crash comes
after, the restarted daemon knows of the sandbox. One whose caller was answered it takes over
(:meth:`Maker.adopt`); the remains of any other it removes, and tells its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.sandbox import CpuClass, SandboxState
from dsec_sandboxd.errors import as_dsec_error
from dsec_sandboxd.gpu_slices import GpuDevices
from dsec_sandboxd.kernel.interface import Kernel, SandboxIdentity, SandboxSpec
from dsec_sandboxd.kernel.replacing import heir_name
from dsec_sandboxd.layer_folds import LayerFolds
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.layers.records import Layer
from dsec_sandboxd.ports import (
    AdoptionListener,
    AgentSockets,
    EndListener,
    PutBackListener,
    SandboxNetworks,
    SnapshotHold,
    SnapshotLayers,
    WarmSandboxes,
)
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.run_directory import RunDirectory

_log: Final = structlog.get_logger(__name__)


@dataclass(slots=True)
class Adoption:
    """What became of an earlier daemon's sandboxes."""

    adopted: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    """Why each of the others could not be taken over, in a sentence."""
    removed: list[str] = field(default_factory=list)
    """Whose remains in the kernel were removed."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What a sandbox that was made ahead was made with."""

    directory: Path
    below: tuple[str, ...]


class RemakeError(Exception):
    """A sandbox that was to be put back is gone. ``error`` says why it could not be made again."""

    def __init__(self, error: DsecError) -> None:
        super().__init__(str(error))
        self.error = error


class Maker:
    """Puts sandboxes together from kernel, layers, run directory and agent socket."""

    def __init__(
        self,
        kernel: Kernel,
        holds: LayerHolds,
        agent_sockets: AgentSockets,
        directories: RunDirectory,
    ) -> None:
        self._kernel = kernel
        self._holds = holds
        self._agent_sockets = agent_sockets
        self._directories = directories
        self._held: dict[str, list[str]] = {}
        self._ahead: dict[str, _Ahead] = {}  # what was made ahead of need and is nobody's yet
        self._folds: LayerFolds | None = None
        self._snapshots: SnapshotLayers | None = None
        self._snapshot_holds: dict[str, SnapshotHold] = {}
        self._remaking: dict[str, asyncio.Lock] = {}
        self._switching: dict[str, asyncio.Future[None]] = {}
        self._end_listeners: list[EndListener] = []
        self._put_back_listeners: list[PutBackListener] = []
        self.networks: SandboxNetworks | None = None
        self.warm: WarmSandboxes | None = None
        self.gpus: GpuDevices | None = None
        self.cold = 0  # how many are being made for somebody who waits
        self._adoption_listeners: list[AdoptionListener] = []

    def _with_gpus(self, record: SandboxRecord, spec: SandboxSpec) -> SandboxSpec:
        return spec if self.gpus is None else self.gpus.given_to(spec, record.slices)

    def use_snapshots(self, snapshots: SnapshotLayers) -> None:
        """Take the part that has the layers of snapshots; before any sandbox is made."""
        self._snapshots = snapshots

    def use_folds(self, folds: LayerFolds) -> None:
        """Take the part that mounts neighbouring layers as one; before any sandbox is made."""
        self._folds = folds

    async def _hold_below(
        self, layers: Sequence[Layer], snapshots: int
    ) -> tuple[tuple[str, ...], list[str]]:
        """Have a sandbox's layers mounted; return the mounts, lowest first, and all that is held.

        A layer that is part of a fold is held too: it may be wanted by itself at any time.
        """
        below = [(layer.digest, layer.image_path) for layer in layers]
        if self._folds is not None:
            below = await self._folds.mounts(layers, snapshots)
        mounts = tuple(digest for digest, _ in below)
        folded = [layer.digest for layer in layers if layer.digest not in mounts]
        try:
            await self._holds.hold(below, unmounted=folded)
        except DsecError as error:
            if error.code is ErrorCode.LAYER_ERROR:
                self._doubt(mounts)
            raise
        return mounts, [*mounts, *folded]

    def _required_snapshots(self) -> SnapshotLayers:
        if self._snapshots is None:
            raise DsecError(ErrorCode.INTERNAL, "the node is not put together: no snapshots")
        return self._snapshots

    def on_end(self, listener: EndListener, put_back: PutBackListener | None = None) -> None:
        """Tell ``listener`` of every sandbox that is about to be removed.

        Args:
            listener: is told, also of one that is about to be put back, unless:
            put_back: is told of those instead.
        """
        self._end_listeners.append(listener)
        self._put_back_listeners.append(put_back or listener.sandbox_ending)

    def on_adoption(self, listener: AdoptionListener) -> None:
        """Tell ``listener`` of every sandbox that was taken over from an earlier daemon."""
        self._adoption_listeners.append(listener)

    async def adopt(self, records: Sequence[SandboxRecord]) -> Adoption:
        """Take over the sandboxes of an earlier daemon, and remove the remains of all others.

        To be called once, before any sandbox is made, with the records of those that live on.
        """
        known = {record.local: record.identity for record in records if record.identity is not None}
        paused = {record.local for record in records if record.state is SandboxState.PAUSED}
        adoption = Adoption(lost=await self._kernel.adopt(known, paused))
        for record in records:
            if record.local not in known:
                adoption.lost[record.local] = "it was not known by what to recognise it"
            elif record.local not in adoption.lost:
                try:
                    await self._take_over(record)
                except Exception as error:  # noqa: BLE001  one sandbox must not keep the node down
                    _log.warning("not_adopted", local=record.local, error=str(error))
                    told = error.message if isinstance(error, DsecError) else type(error).__name__
                    adoption.lost[record.local] = told
                    with contextlib.suppress(DsecError):  # what stays, the reconciler removes
                        await self._kernel.destroy(record.local)
                    await self.let_go(record.local)
                else:
                    adoption.adopted.add(record.local)
        adoption.removed = await self._kernel.recover()
        for local in self._directories.names():
            if local not in adoption.adopted:
                self._directories.remove(local)
        return adoption

    async def _take_over(self, record: SandboxRecord) -> None:
        self._holds.adopt(record.layer_digests)
        self._held[record.local] = list(record.layer_digests)
        if record.snapshot_layers:
            snapshots = self._required_snapshots()
            hold = snapshots.adopt(record.local, record.snapshot_layers)
            self._snapshot_holds[record.local] = hold
        directory = self._directories.find(record.local)
        if directory is None:
            raise not_found("its run directory is gone", what="directory")
        await self._agent_sockets.open(record, directory)
        for listener in self._adoption_listeners:
            await listener.sandbox_adopted(record)

    async def check_networks(self, *policies: NetworkPolicy | None) -> None:
        """Refuse policies that are wrong, or that this node cannot enforce, before anything starts.

        Raises:
            DsecError: ``invalid``, ``unsupported``.
        """
        if self.networks is not None and any(policies):
            await self.networks.check(*policies)

    async def make(self, record: SandboxRecord, layers: Sequence[Layer]) -> None:
        """Make a sandbox; on return it answers commands.

        Raises:
            DsecError: what the kernel or the layers refused; then nothing of it is left, unless
                the log says otherwise.
        """
        try:
            if self.warm is not None:
                self.warm.passed_over()
            self.cold += 1
            try:
                await self._take(record, layers)
            finally:
                self.cold -= 1
        except BaseException as failure:
            await self._undo(record, failure)
            raise

    async def _undo(self, record: SandboxRecord, failure: BaseException) -> None:
        """Leave nothing of a sandbox that could not be made."""
        if isinstance(failure, DsecError) and failure.code is ErrorCode.LAYER_ERROR:
            self._doubt(self._held.get(record.local, record.layer_digests))
        try:
            await self._kernel.destroy(record.local)
        except DsecError as error:
            _log.error("half_made_sandbox_left", local=record.local, error=str(error))
        await self.let_go(record.local)

    async def make_ahead(self, record: SandboxRecord, layers: Sequence[Layer]) -> None:
        """Make a sandbox that is nobody's yet: all of it but a network and who its agent is.

        Raises:
            DsecError: as :meth:`make`; then nothing of it is left.
        """
        try:
            below, self._held[record.local] = await self._hold_below(layers, 0)
            directory = self._directories.make(record.local)
            await self._kernel.create(_spec(record, directory, below, ()))
            await self._agent_sockets.open(record, directory)
        except BaseException as failure:
            await self._undo(record, failure)
            raise
        self._ahead[record.local] = _Ahead(directory, below)

    def waits(self, local: str) -> bool:
        """Return whether a sandbox that was made ahead is there, as far as is known without a look.

        :meth:`hand_out` looks.
        """
        return local in self._ahead

    async def hand_out(self, record: SandboxRecord) -> SandboxRecord | None:
        """Make the sandbox of the record's id, which was made ahead, what the record says.

        Returns:
            None when it is that, and answers commands. Else it is dropped, and the placement is to
            go on with the record that is returned: of another, or of a new one.

        Raises:
            DsecError: what else failed, or that there is no other; then nothing of it is left.
        """
        warm = self.warm
        assert warm is not None  # noqa: S101  it is from there
        try:
            try:
                await self._bind(record)
            except DsecError as error:
                _log.warning("not_handed_out", local=record.local, error=str(error))
                return warm.claim_next(record)
            if self.networks is not None:
                self.networks.expect(record)
                await self.networks.attach(record)
        except BaseException as failure:
            await self._undo(record, failure)
            raise
        warm.handed_out(record)
        return None

    async def _bind(self, record: SandboxRecord) -> None:
        ahead = self._ahead.get(record.local)
        if ahead is None:
            raise not_found("it has ended", what="sandbox")
        await self._kernel.bind(_spec(record, ahead.directory, ahead.below, ()))
        await self._agent_sockets.open(record, ahead.directory)
        self._ahead.pop(record.local, None)

    async def drop_ahead(self, handle: str) -> None:
        """Take apart a sandbox that was made ahead and that nobody was given. Idempotent."""
        await self._kernel.destroy(handle)
        await self.let_go(handle)

    def _doubt(self, digests: Sequence[str]) -> None:
        self._holds.doubt(digests)
        if self._folds is not None:
            self._folds.forget_images(digests)

    async def _take(self, record: SandboxRecord, layers: Sequence[Layer]) -> None:
        below, self._held[record.local] = await self._hold_below(
            layers, len(record.snapshot_layers)
        )
        digests: tuple[str, ...] = ()
        if record.snapshot_layers:
            hold = await self._required_snapshots().hold(record.local, record.snapshot_layers)
            self._snapshot_holds[record.local] = hold
            digests = hold.digests
        directory = self._directories.make(record.local)
        if self.networks is not None:
            self.networks.expect(record)
        creating = asyncio.create_task(
            self._kernel.create(self._with_gpus(record, _spec(record, directory, below, digests))),
            name=f"kernel create {record.local}",
        )
        # The spawner works on the sandbox while this process makes the socket.
        await asyncio.sleep(0)
        try:
            await self._agent_sockets.open(record, directory)
        finally:
            await creating
        if self.networks is not None:
            await self.networks.attach(record)

    async def remake(
        self,
        record: SandboxRecord,
        below: Sequence[Layer],
        layers: Sequence[str],
        keep: Callable[[SandboxIdentity], None],
    ) -> None:
        """Put a running sandbox back: mount it anew on snapshot layers and end what runs in it.

        The new one is whole before anything of the old one ends. Its run directory and its agent's
        socket stay.

        Args:
            record: of the sandbox.
            below: its layers; one that was taken over from an earlier daemon has them mounted, but
                this daemon may not.
            layers: of snapshots, lowest first.
            keep: writes down by what a later daemon recognises it from now on. A daemon that dies
                before that leaves the old one to the next, else the new one, which that finishes
                with :meth:`finish_remake`.

        Raises:
            RemakeError: when the sandbox is gone and there is no new one.
            DsecError: any other; then nothing has changed.
        """
        local = record.local
        async with self._remaking.setdefault(local, asyncio.Lock()):
            directory = self._directories.find(local)
            if directory is None or local not in self._held:
                raise not_found("the sandbox has ended", what="sandbox")
            mounts, held = await self._hold_below(below, len(layers))
            hold: SnapshotHold | None = None
            heir = heir_name(local)
            try:
                hold = await self._required_snapshots().hold(local, layers)
                spec = self._with_gpus(record, _spec(record, directory, mounts, hold.digests))
                await self._kernel.create(dataclasses.replace(spec, local=heir))
                keep(dataclasses.replace(self._kernel.identity(heir), handle=heir))
            except BaseException as error:
                try:
                    await self._kernel.destroy(heir)
                finally:  # what stays of it is nobody's, and the reconciler removes it
                    self._holds.release(held)
                    if hold is not None:
                        hold.release()
                if isinstance(error, DsecError) and self._is_gone(local):
                    raise RemakeError(error) from error  # the old one died meanwhile, untold
                raise
            self._holds.release(self._held[local])
            self._held[local] = held
            before = self._snapshot_holds.get(local)
            self._snapshot_holds[local] = hold
            try:
                await self._inherit(record, heir)
            finally:
                if before is not None:
                    before.release()

    async def _inherit(self, record: SandboxRecord, heir: str) -> None:
        """Give a sandbox's id and network to its heir; requests wait, and find the heir."""
        local = record.local
        switching = self._switching[local] = asyncio.get_running_loop().create_future()
        try:
            for listener in self._put_back_listeners:
                await listener(local)
            await self._kernel.replace(local, heir)
            if self.networks is not None:
                await self.networks.attach(record)
        except Exception as error:
            # What hangs in the kernel stays in the books, and a deletion tries again.
            for name in (heir, local):
                await self._kernel.destroy(name)
            raise RemakeError(as_dsec_error("putting a sandbox back", error)) from error
        finally:
            del self._switching[local]
            switching.set_result(None)

    def _is_gone(self, local: str) -> bool:
        try:
            self._kernel.identity(local)
        except DsecError:
            return True
        return False

    async def finish_remake(self, record: SandboxRecord) -> None:
        """Finish what a daemon that died had begun: give a sandbox that was put back its network.

        Raises:
            RemakeError: when that is impossible; then the sandbox has ended.
        """
        if self.networks is None:
            return
        async with self._remaking.setdefault(record.local, asyncio.Lock()):
            try:
                await self.networks.sandbox_ending(record.local)
                await self.networks.attach(record)
            except DsecError as error:
                await self._kernel.destroy(record.local)
                raise RemakeError(error) from error

    def switching(self, local: str) -> asyncio.Future[None] | None:
        """Return what is done once a sandbox that is put back takes requests again, if it is."""
        return self._switching.get(local)

    def is_remaking(self, local: str) -> bool:
        """Return whether a sandbox is being put back: its end in the kernel is meant."""
        lock = self._remaking.get(local)
        return lock is not None and lock.locked()

    async def unmake(self, local: str) -> None:
        """Take a sandbox apart; on return nothing of it is left. Idempotent.

        Raises:
            DsecError: when the kernel does not let go of it.
        """
        lock = self._remaking.get(local)
        if lock is not None:
            async with lock:  # else it would be made again after its end
                pass
        await self._tell_ending(local)  # a descriptor in it would keep its memory
        await self._kernel.destroy(local)
        await self.let_go(local)

    async def let_go(self, local: str) -> None:
        """Let go of what a sandbox holds outside the kernel. Idempotent."""
        await self._tell_ending(local)
        await self._agent_sockets.close(local)
        self._directories.remove(local)
        self._ahead.pop(local, None)
        digests = self._held.pop(local, None)
        if digests:
            self._holds.release(digests)
        hold = self._snapshot_holds.pop(local, None)
        if hold is not None:
            hold.release()
        self._remaking.pop(local, None)

    async def _tell_ending(self, local: str) -> None:
        for listener in self._end_listeners:
            await listener.sandbox_ending(local)


def _spec(
    record: SandboxRecord,
    directory: Path,
    below: tuple[str, ...],
    snapshot_digests: tuple[str, ...],
) -> SandboxSpec:
    limits = record.limits
    return SandboxSpec(
        local=record.local,
        layers=(*below, *snapshot_digests),
        on_snapshot=bool(snapshot_digests),
        memory_bytes=limits.memory_bytes,
        cpus=limits.cpus,
        pids=limits.pids,
        disk_bytes=limits.disk_bytes,
        inodes=limits.inodes,
        hostname=record.local.lower().replace("_", "-"),
        run_directory=directory,
        best_effort=limits.cpu_class is CpuClass.BEST_EFFORT,
        core_scheduling=limits.core_scheduling,
        oom_group=limits.oom_group,
        cpu_quota=limits.cpu_quota,
    )
