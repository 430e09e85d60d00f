"""Lending to sandboxes of the recording kernel."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

from dsec_common.errors import DsecError, ErrorCode
from dsec_sandboxd.kernel.recorded_alone import RecordedAlone

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from dsec_sandboxd.kernel.interface import DeviceNode
    from dsec_sandboxd.kernel.lending import LentMount


class RecordedLending(RecordedAlone):
    """``LendingKernel`` in memory, beside ``AloneKernel``."""

    layers: dict[str, Path]

    @cached_property
    def lent_devices(self) -> dict[str, set[str]]:
        """By sandbox, the names of the devices that it was lent and that were not taken back."""
        return {}

    @cached_property
    def lent_mounts(self) -> dict[str, set[str]]:
        """By sandbox, the places that something is mounted on."""
        return {}

    @abstractmethod
    async def _enter(self, name: str, **arguments: object) -> None:
        """Write a call down; wait or fail as a test said."""

    async def lend_devices(self, local: str, devices: Sequence[DeviceNode]) -> None:
        """Remember devices."""
        self.is_paused(local)  # raises for one that is not there
        await self._enter("lend_devices", local=local, devices=devices)
        self.lent_devices.setdefault(local, set()).update(it.name for it in devices)

    async def take_devices(self, local: str, devices: Sequence[DeviceNode]) -> None:
        """Forget devices."""
        await self._enter("take_devices", local=local, devices=devices)
        self.lent_devices.get(local, set()).difference_update(it.name for it in devices)

    async def lend_mount(self, local: str, mount: LentMount) -> None:
        """Remember a mount."""
        self.is_paused(local)
        await self._enter("lend_mount", local=local, mount=mount)
        if mount.layer and mount.layer not in self.layers:
            raise DsecError(ErrorCode.LAYER_ERROR, f"the layer {mount.layer} is not held")
        self.lent_mounts.setdefault(local, set()).add(str(mount.place))

    async def volumes(self, local: str, places: Sequence[Path]) -> frozenset[int]:
        """Return nothing: what is remembered here has no number."""
        await self._enter("volumes", local=local, places=places)
        return frozenset()

    async def take_mounts(
        self, local: str, places: Sequence[Path], volumes: Collection[int] = ()
    ) -> None:
        """Forget mounts, and remove their places."""
        del volumes
        await self._enter("take_mounts", local=local, places=places)
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                place.rmdir()
            self.lent_mounts.get(local, set()).discard(str(place))
