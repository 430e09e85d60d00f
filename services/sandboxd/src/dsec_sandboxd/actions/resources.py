"""Taking what an action asks for, one thing after the other, and giving all of it back.

Each thing is written down before it is taken and after it. Giving back looks at nothing but the
record, does each thing whether or not it was taken, and may be done any number of times: so it is
the way out of a refusal, of an orderly end, and of whatever line a daemon died at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from dsec_common import subjects
from dsec_common.bus import Bus
from dsec_common.clock import Clock
from dsec_common.compute.model import Slice
from dsec_common.errors import DsecError, from_os_error, not_found
from dsec_common.wire.action import AcquiredKind, BeginAction
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeaseReleased, ReleaseLease
from dsec_sandboxd.actions.book import ActionBook
from dsec_sandboxd.actions.records import DIRECTORY, ActionRecord, HeldVolume
from dsec_sandboxd.gpu_slices import MPS_PIPES, GpuDevices
from dsec_sandboxd.kernel.interface import DeviceNode, Kernel
from dsec_sandboxd.kernel.lending import LentMount
from dsec_sandboxd.layer_cache import LayerCache
from dsec_sandboxd.layer_holds import LayerHolds
from dsec_sandboxd.metering import Meters
from dsec_sandboxd.network.networks import Networks
from dsec_sandboxd.ports import Uses
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.run_directory import RunDirectory

_log: Final = structlog.get_logger(__name__)

#: From the grant to the heartbeat that names the lease first; without one it ends by itself.
_LEASE_TTL_S: Final = 60.0
_GRANT_TIMEOUT_S: Final = 5.0
_RELEASE_TIMEOUT_S: Final = 2.0
_RELEASE_AGAIN_S: Final = 1.0
_RELEASES_MAX: Final = 300

Save = Callable[[ActionRecord], None]
"""Keeps an action as it is now.

It raises ``unavailable`` when the StateDB refuses.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenders:
    """Who has what actions are given."""

    node: str
    bus: Bus
    kernel: Kernel
    clock: Clock
    layers: LayerCache
    holds: LayerHolds
    directories: RunDirectory
    gpus: GpuDevices
    uses: Uses
    meters: Meters | None
    networks: Callable[[], Networks]


class Resources:
    """Takes and returns what actions have."""

    def __init__(
        self,
        lenders: Lenders,
        book: ActionBook,
        save: Save,
        unheard: Callable[[ActionRecord], None],
    ) -> None:
        self._lenders = lenders
        self._book = book
        self._save = save
        self._unheard = unheard
        self._device_turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._holding: set[tuple[str, str]] = set()

    async def wanted(self, project: str, asked: BeginAction) -> tuple[HeldVolume, ...]:
        """Return the volumes of a request, with the layers that they mean now.

        Raises:
            DsecError: ``not_found`` or ``layer_error`` for a layer; for the network ``invalid`` or
                ``unsupported``.
        """
        await self._lenders.networks().check(asked.network)
        references = [volume.layer for volume in asked.volumes if volume.layer]
        layers = await self._lenders.layers.resolve(project, references)
        digests = {layer: found.digest for layer, found in zip(references, layers, strict=True)}
        return tuple(
            HeldVolume(name=one.name, reference=one.layer, digest=digests[one.layer])
            if one.layer
            else HeldVolume(name=one.name, size_bytes=one.size_bytes, inodes=one.inodes)
            for one in asked.volumes
        )

    def adopt(self, action: ActionRecord, record: SandboxRecord) -> None:
        """Count the layers of an action of an earlier daemon, and meter its units; all is there."""
        self._lenders.holds.adopt(action.digests)
        self._holding.add((action.local, action.action_id))
        for one in action.acquired:
            if action.granted and one.kind is AcquiredKind.UNITS:
                self._meter(record, one.acquired_at)

    # --- Taking -------------------------------------------------------------------------------

    async def take(self, action: ActionRecord, record: SandboxRecord) -> ActionRecord:
        """Take all that an action asks for; what was taken before a failure is not returned here.

        Raises:
            DsecError: why not.
        """
        if action.gpu is not None:
            action = await self._take_units(action, record)
        if action.volumes:
            action = await self._take_volumes(action)
        if action.network is not None:
            action = await self._take_network(action, record)
        return action

    async def _take_units(self, action: ActionRecord, record: SandboxRecord) -> ActionRecord:
        lenders = self._lenders
        asked = GrantLease(
            message_id=action.action_id,
            project=action.project,
            holder=f"{lenders.node}.{action.local}",
            node=lenders.node,
            ttl_s=_LEASE_TTL_S,
            demand=action.gpu,
            agent=record.agent,
            holds_s=action.timeout_s,
        )
        granted = await lenders.bus.request(
            subjects.node_lease(lenders.node, "grant"),
            asked,
            LeaseGranted,
            timeout_s=_GRANT_TIMEOUT_S,
        )
        async with self._device_turns[action.local]:
            action = msgspec.structs.replace(action, granted=True, slices=granted.slices)
            try:
                # Once its card is lost nobody could tell them any more.
                devices = lenders.gpus.nodes(action.slices)
                action = msgspec.structs.replace(action, devices=devices)
            finally:  # it is granted all the same
                action = action.with_acquired(
                    AcquiredKind.UNITS, granted.lease_id, lenders.clock.now(), granted.cu
                )
                self._save(action)
            self._meter(record, lenders.clock.now())
            await lenders.kernel.lend_devices(action.local, action.devices)
            await self._lend_pipes(action, record)
        return action

    async def _lend_pipes(self, action: ActionRecord, record: SandboxRecord) -> None:
        """Have the pipes of CUDA's MPS seen, unless they are for another reason."""
        gpus, held = self._lenders.gpus, self._others(action, record)
        pipes = gpus.pipes(action.slices)
        if pipes is None or gpus.pipes(held) is not None:
            return
        place = self._run_directory(action.local) / "mps"
        _make(place)
        mount = LentMount(place=place, path=MPS_PIPES, given=pipes)
        await self._lenders.kernel.lend_mount(action.local, mount)

    async def _take_volumes(self, action: ActionRecord) -> ActionRecord:
        lenders, run_directory = self._lenders, self._run_directory(action.local)
        _make(run_directory / DIRECTORY)
        _make(action.place(run_directory))
        layers = await lenders.layers.resolve(
            action.project, [volume.digest for volume in action.volumes if volume.digest]
        )
        if layers:
            await lenders.holds.hold([(layer.digest, layer.image_path) for layer in layers])
        self._holding.add((action.local, action.action_id))
        for volume in action.volumes:
            place = action.place(run_directory, volume.name)
            _make(place)
            await lenders.kernel.lend_mount(
                action.local,
                LentMount(
                    place=place,
                    path=action.inside(volume.name),
                    layer=volume.digest,
                    size_bytes=volume.size_bytes,
                    inodes=volume.inodes,
                ),
            )
            kind = AcquiredKind.LAYER if volume.digest else AcquiredKind.VOLUME
            name = volume.reference or volume.name
            action = action.with_acquired(kind, name, lenders.clock.now(), volume.size_bytes)
            self._save(action)
        return action

    async def _take_network(self, action: ActionRecord, record: SandboxRecord) -> ActionRecord:
        policy, networks = action.network, self._lenders.networks()
        assert policy is not None  # noqa: S101  who calls has looked
        before = await networks.info(record)
        action = msgspec.structs.replace(
            action, network_before=before.policy, phase_before=before.phase
        )
        now = self._lenders.clock.now()
        action = action.with_acquired(AcquiredKind.NETWORK, policy.mode.value, now)
        self._save(action)
        await networks.set_policy(record, policy)
        return action

    # --- Giving back --------------------------------------------------------------------------

    async def give_back(
        self, action: ActionRecord, record: SandboxRecord | None, *, restore_network: bool
    ) -> ActionRecord:
        """Return all that an action has, or may have.

        Args:
            action: as it is.
            record: of its sandbox; None for one that is over: then only the rest is returned.
            restore_network: the sandbox goes on.

        Raises:
            DsecError: what could not be returned yet; to be done again.
        """
        now = self._lenders.clock.now
        if record is not None and restore_network and action.network_before is not None:
            await self._give_network_back(action, record)
        action = action.with_returned(AcquiredKind.NETWORK, now())
        if action.volumes:
            action = await self._give_volumes_back(action)
            action = action.with_returned(AcquiredKind.VOLUME, now())
            action = action.with_returned(AcquiredKind.LAYER, now())
        if action.lease_id:
            action = await self._give_units_back(action, record)
            action = action.with_returned(AcquiredKind.UNITS, now())
        return action

    async def _give_network_back(self, action: ActionRecord, record: SandboxRecord) -> None:
        """Have what the sandbox might reach before; what was set since by anybody else stays.

        A phase that is over does not come back.
        """
        networks = self._lenders.networks()
        assert action.network_before is not None  # noqa: S101  who calls has looked
        now = await networks.info(record)
        if now.policy == action.network and now.phase == (action.phase_before or now.phase):
            await networks.set_policy(record, action.network_before)

    async def _give_volumes_back(self, action: ActionRecord) -> ActionRecord:
        lenders = self._lenders
        run_directory = lenders.directories.find(action.local)
        if run_directory is not None:
            places = [action.place(run_directory, volume.name) for volume in action.volumes]
            known = await lenders.kernel.volumes(action.local, places)
            if not known <= {*action.volume_numbers}:
                numbers = tuple(sorted(known.union(action.volume_numbers)))
                action = msgspec.structs.replace(action, volume_numbers=numbers)
                self._save(action)
            await lenders.kernel.take_mounts(action.local, places, action.volume_numbers)
            with contextlib.suppress(OSError):  # it was never made
                action.place(run_directory).rmdir()
        if (action.local, action.action_id) in self._holding:
            self._holding.remove((action.local, action.action_id))
            lenders.holds.release(action.digests)
        return action

    async def _give_units_back(
        self, action: ActionRecord, record: SandboxRecord | None
    ) -> ActionRecord:
        lenders = self._lenders
        async with self._device_turns[action.local]:
            if action.granted and record is not None:
                await self._take_devices(action, record)
            # No heartbeat names it from here on, so it ends even when nobody hears what follows.
            action = msgspec.structs.replace(action, granted=False)
            self._save(action)
            if record is not None:
                self._meter(record, lenders.clock.now())
        try:
            await self._release(action.lease_id)
        except DsecError as error:
            _log.warning("lease_not_released", lease=action.lease_id, error=str(error))
            self._unheard(action)
        return action

    async def _release(self, lease_id: str) -> None:
        lenders = self._lenders
        await lenders.bus.request(
            subjects.node_lease(lenders.node, "release"),
            ReleaseLease(lease_id=lease_id),
            LeaseReleased,
            timeout_s=_RELEASE_TIMEOUT_S,
        )

    async def release_again(self, action: ActionRecord) -> None:
        """Say until a broker has heard it that an action's lease is over.

        One that a heartbeat has named is over anyway when none does. One that none has named would
        stay for as long as a broker waits for the first to do so, and after that it is over, too.
        """
        for _ in range(_RELEASES_MAX):
            await self._lenders.clock.sleep(_RELEASE_AGAIN_S)
            now = self._book.find(action.local, action.action_id)
            if now is not None and now.is_open:
                return  # it has been begun anew, and has the same lease
            with contextlib.suppress(DsecError):
                await self._release(action.lease_id)
                return

    async def _take_devices(self, action: ActionRecord, record: SandboxRecord) -> None:
        lenders, held = self._lenders, self._others(action, record)
        stay = {device.name for device in self._devices(held)}
        stay |= self._book.devices(action.local, but=action.action_id)
        lent = action.devices or self._devices(action.slices)
        gone = [device for device in lent if device.name not in stay]
        await lenders.kernel.take_devices(action.local, gone)
        run_directory = lenders.directories.find(action.local)
        if run_directory is not None and not _need_pipes(held, lenders.gpus):
            await lenders.kernel.take_mounts(action.local, [run_directory / "mps"])

    def _devices(self, slices: Iterable[Slice]) -> list[DeviceNode]:
        """Return the devices of slices; those of a card that is lost cannot be told any more."""
        found: dict[str, DeviceNode] = {}
        for slice_ in slices:
            with contextlib.suppress(DsecError):
                found |= {device.name: device for device in self._lenders.gpus.nodes([slice_])}
        return list(found.values())

    def _others(self, action: ActionRecord, record: SandboxRecord) -> tuple[Slice, ...]:
        """Return the slices that the sandbox has but for an action's."""
        return (*record.slices, *self._book.slices(action.local, but=action.action_id))

    def _meter(self, record: SandboxRecord, since: float) -> None:
        if self._lenders.meters is not None:
            self._lenders.meters.slices_changed(record, since)

    def forget(self, local: str) -> None:
        """Forget a sandbox that is over."""
        self._device_turns.pop(local, None)

    def _run_directory(self, local: str) -> Path:
        directory = self._lenders.directories.find(local)
        if directory is None:
            raise not_found("the run directory of the sandbox is gone", what="sandbox")
        return directory


def _need_pipes(slices: Iterable[Slice], gpus: GpuDevices) -> bool:
    try:
        return gpus.pipes(slices) is not None
    except DsecError:  # they are gone
        return False


def _make(place: Path) -> None:
    try:
        place.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise from_os_error("mkdir", error, str(place)) from error
