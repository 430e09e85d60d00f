"""Lending devices and mounts to living sandboxes, and taking them back: the real kernel's part."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from typing import TYPE_CHECKING, Final

from dsec_common.errors import DsecError, ErrorCode, from_os_error
from dsec_sandboxd.kernel.cgroups_layout import LimitText
from dsec_sandboxd.kernel.init import ended_error
from dsec_sandboxd.kernel.mounts import clone_read_only
from dsec_sandboxd.kernel.part import KernelPart
from dsec_sandboxd.kernel.protocol import SETTING_PATH, Lending, SpawnerKind, SpawnerRequest
from dsec_sandboxd.kernel.specification import device_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from dsec_sandboxd.kernel.interface import DeviceNode
    from dsec_sandboxd.kernel.layer_table import LayerTable
    from dsec_sandboxd.kernel.lending import LentMount
    from dsec_sandboxd.kernel.sandbox import Sandbox

_LOOK_S: Final = 0.005
_LOOKS_MAX: Final = 400
#: What a volume is called in the table of mounts.
_VOLUME: Final = "dsec-volume"


class Lender(KernelPart):
    """The part of ``Kernel`` that lends. See the interface."""

    _layers: LayerTable

    async def lend_devices(self, local: str, devices: Sequence[DeviceNode]) -> None:
        """Have devices in a sandbox's ``/dev``."""
        await self._change_devices(self._require(local), devices, Lending.LEND_DEVICES)

    async def take_devices(self, local: str, devices: Sequence[DeviceNode]) -> None:
        """Have them there no more, and kill what has one open."""
        sandbox = self._sandboxes.get(local)
        if sandbox is None or not devices:
            return
        await self._change_devices(sandbox, devices, Lending.TAKE_DEVICES)
        numbers = {os.makedev(device.major, device.minor) for device in devices}
        await _end_users(sandbox, numbers, frozenset())

    async def _change_devices(
        self, sandbox: Sandbox, devices: Sequence[DeviceNode], what: Lending
    ) -> None:
        request = SpawnerRequest(
            kind=SpawnerKind.LEND,
            slot=sandbox.slot,
            base_id=self._base_id(sandbox.slot),
            flags=what,
            limit_texts=device_texts(devices),
        )
        await (await self._living_spawner()).request(request)

    async def lend_mount(self, local: str, mount: LentMount) -> None:
        """Mount something in a sandbox's run directory."""
        sandbox = self._require(local)
        if sandbox.pidfd < 0:
            raise ended_error()
        request = SpawnerRequest(
            kind=SpawnerKind.LEND,
            slot=sandbox.slot,
            base_id=self._base_id(sandbox.slot),
            layer=self._layers.handle(mount.layer) if mount.layer else 0,
            flags=_kind_of(mount),
            disk_bytes=mount.size_bytes,
            inodes=mount.inodes,
            limit_texts=[LimitText(SETTING_PATH, mount.path, b"")],
        )
        spawner = await self._living_spawner()
        opened: list[int] = []
        try:
            opened.append(_open_directory(mount.place))
            if mount.given is not None:
                opened.append(clone_read_only(mount.given))
            await spawner.request(request, [sandbox.pidfd, *opened])
        finally:
            for descriptor in opened:
                os.close(descriptor)

    async def volumes(self, local: str, places: Sequence[Path]) -> frozenset[int]:
        """Return the device numbers of the volumes that are mounted on places."""
        sandbox = self._sandboxes.get(local)
        return _volumes(sandbox, places) if sandbox is not None else frozenset()

    async def take_mounts(
        self, local: str, places: Sequence[Path], volumes: Collection[int] = ()
    ) -> None:
        """Remove places with what is mounted on them, and kill what uses a volume."""
        sandbox = self._sandboxes.get(local)
        volumes = {*volumes, *await self.volumes(local, places)}
        for place in places:
            # The kernel unmounts what other namespaces have mounted on a directory that is removed.
            with contextlib.suppress(FileNotFoundError):
                place.rmdir()
        if sandbox is not None and volumes:
            # A number that is to be seen now is another's by now: its volume is gone, and free.
            await _end_users(sandbox, frozenset(), volumes - _mounted(sandbox))


def _kind_of(mount: LentMount) -> Lending:
    if mount.layer:
        return Lending.LEND_LAYER
    return Lending.LEND_VOLUME if mount.given is None else Lending.LEND_GIVEN


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error("open", error, str(path)) from error


def _volumes(sandbox: Sandbox, places: Sequence[Path]) -> frozenset[int]:
    """Return the device numbers of the volumes that are mounted on places.

    A place is recognised by its last two names: its root may have moved what is above them.
    """
    ends = tuple(f"/{place.parent.name}/{place.name}" for place in places)
    return _mounted(sandbox, lambda path, source: source == _VOLUME and path.endswith(ends))


def _mounted(
    sandbox: Sandbox, is_meant: Callable[[str, str], bool] = lambda _path, _source: True
) -> frozenset[int]:
    """Return the device numbers of what is mounted in a sandbox, by path and source."""
    try:
        table = _read(f"/proc/{_first_process(sandbox)}/mountinfo")
    except (OSError, ValueError):  # it is dead, and so is everything in it
        return frozenset()
    found = set()
    # The kernel escapes no other white space than these two, and names are root's inside to choose.
    for line in table.removesuffix("\n").split("\n"):
        words = line.split(" ")
        if is_meant(words[4], words[-2]):
            major, minor = words[2].split(":")
            found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)


def _first_process(sandbox: Sandbox) -> int:
    for line in _read(f"/proc/self/fdinfo/{sandbox.pidfd}").splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise ValueError(sandbox.pidfd)


async def _end_users(sandbox: Sandbox, devices: Collection[int], volumes: Collection[int]) -> None:
    """Kill the processes that have something open, and return when none has it.

    Raises:
        DsecError: ``timeout`` when one does not die.
    """
    for _ in range(_LOOKS_MAX):
        if not await asyncio.to_thread(_kill_users, sandbox, devices, volumes):
            return
        await asyncio.sleep(_LOOK_S)
    raise DsecError(
        ErrorCode.TIMEOUT,
        f"a process of {sandbox.local!r} that uses what was lent to it does not die",
        details={"operation": "take_back"},
    )


def _kill_users(sandbox: Sandbox, devices: Collection[int], volumes: Collection[int]) -> bool:
    """Kill who uses something now; return whether anybody did."""
    found = False
    try:
        first = _first_process(sandbox)
        processes = sandbox.cgroup.processes()
    except (OSError, ValueError, DsecError):
        return False
    for pid in processes:
        if pid == first or not _uses(pid, devices, volumes):
            continue
        found = True
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                if pid in sandbox.cgroup.processes():  # and not another one of that number
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)
    return found


def _uses(pid: int, devices: Collection[int], volumes: Collection[int]) -> bool:
    for task in _names(f"/proc/{pid}/task"):
        place = f"/proc/{pid}/task/{task}"
        links = [f"{place}/cwd", f"{place}/root"]
        links += [f"{place}/fd/{name}" for name in _names(f"{place}/fd")]
        if any(_leads_to(link, devices, volumes) for link in links):
            return True
    maps = f"/proc/{pid}/map_files"
    return any(_leads_to(f"{maps}/{name}", devices, volumes) for name in _names(maps))


def _leads_to(link: str, devices: Collection[int], volumes: Collection[int]) -> bool:
    try:
        status = os.stat(link)  # noqa: PTH116  many, and none of them is a path
    except OSError:
        return False
    is_device = stat.S_ISCHR(status.st_mode) and status.st_rdev in devices
    return is_device or status.st_dev in volumes


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208  as above
    except OSError:
        return []


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:  # noqa: PTH123  of /proc
        return file.read()
