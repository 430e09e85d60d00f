"""What a lease's slices are to a sandbox: device nodes in its ``/dev``, variables of its commands.

CUDA's MPS and the driver obey the variables, which is why no request can set them otherwise: those
here go over all others. They confine programs that use CUDA as it is; one that goes around the
library shares its card with its neighbours all the same, which only MIG prevents.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsec_common.compute.model import CardMode, Slice
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.node import Gpu
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.kernel.interface import DeviceNode, SandboxSpec

MPS_PIPES: Final = "/run/dsec/mps"
"""Where a sandbox with a slice sees the pipes of the node's MPS daemon."""

_SHARED: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
"""What every CUDA program opens beside its cards; the last is there on some hosts only."""
_OPTIONAL: Final = frozenset({"nvidia-uvm-tools"})
_MIB: Final = 1024 * 1024


def environment(slices: Iterable[Slice]) -> dict[str, str]:
    """Return the variables of every command of a sandbox that holds these slices; none for none.

    One percentage holds for all cards of a program: that of the smallest slice.
    """
    held = tuple(slices)
    if not held:
        return {}
    visible = ",".join(slice_.place for slice_ in held)
    variables = {"CUDA_VISIBLE_DEVICES": visible, "NVIDIA_VISIBLE_DEVICES": visible}
    shared = [(at, slice_) for at, slice_ in enumerate(held) if slice_.kind is CardMode.MPS]
    if shared:
        percent = min(slice_.percent for _, slice_ in shared)
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percent)
        variables["CUDA_MPS_PIPE_DIRECTORY"] = MPS_PIPES
        limits = [(at, slice_.memory_bytes // _MIB) for at, slice_ in shared if slice_.memory_bytes]
        if limits:
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(
                f"{at}={max(1, mib)}M" for at, mib in limits
            )
    return variables


class GpuDevices:
    """The GPUs of this node as files.

    Args:
        directory: where the driver's device nodes are, normally ``/dev``.
        pipes: the directory of the node's MPS daemon.
        named: paths below ``directory`` by uuid of card or MIG instance, several with spaces
            between; a card that is not named is ``nvidia<index>``.
        gpus: what the node has now.
    """

    def __init__(
        self,
        directory: Path,
        pipes: Path,
        named: Mapping[str, str],
        gpus: Callable[[], Iterable[Gpu]],
    ) -> None:
        self._directory = directory
        self._pipes = pipes
        self._named = named
        self._gpus = gpus

    def given_to(self, spec: SandboxSpec, slices: tuple[Slice, ...]) -> SandboxSpec:
        """Return the specification with what the slices bring; as it is when there are none.

        Raises:
            DsecError: as :meth:`nodes` and :meth:`pipes`.
        """
        if not slices:
            return spec
        pipes = self.pipes(slices)
        if pipes is not None and spec.run_directory is not None:
            (spec.run_directory / "mps").mkdir(mode=0o755, exist_ok=True)
        return replace(spec, devices=self.nodes(slices), mps_pipes=pipes)

    def nodes(self, slices: Iterable[Slice]) -> tuple[DeviceNode, ...]:
        """Return the device nodes that a sandbox with these slices has; none for none.

        Raises:
            DsecError: ``unavailable`` for a card that this node does not have (any more), or
                whose device is not there; ``unsupported`` for a MIG instance without named devices.
        """
        names: dict[str, None] = {}
        for slice_ in slices:
            for name in self._names(slice_):
                names[name] = None
        if not names:
            return ()
        found = [self._node(name) for name in names]
        found += [self._node(name) for name in _SHARED if self._is_there(name)]
        return tuple(found)

    def pipes(self, slices: Iterable[Slice]) -> Path | None:
        """Return the directory of the MPS daemon when the slices need it.

        Raises:
            DsecError: ``unavailable`` when the daemon's directory is not there.
        """
        if not any(slice_.kind is CardMode.MPS for slice_ in slices):
            return None
        if not self._pipes.is_dir():
            raise _unavailable(
                f"{self._pipes} is not there: start nvidia-cuda-mps-control on this node, or name "
                "its directory in gpu_mps_directory"
            )
        return self._pipes

    def _names(self, slice_: Slice) -> list[str]:
        index = {gpu.uuid: gpu.index for gpu in self._gpus()}.get(slice_.card)
        if index is None:
            raise _unavailable(f"this node has no GPU {slice_.card} (any more)")
        card = self._named.get(slice_.card, f"nvidia{index}").split()
        if slice_.kind is not CardMode.MIG:
            return card
        instance = self._named.get(slice_.mig_uuid, "").split()
        if not instance:
            raise DsecError(
                ErrorCode.UNSUPPORTED,
                f"nobody said which devices of nvidia-caps are MIG instance {slice_.mig_uuid}: "
                "name them in gpu_devices",
                details={"mig_uuid": slice_.mig_uuid},
            )
        return [*card, *instance]

    def _is_there(self, name: str) -> bool:
        return name not in _OPTIONAL or (self._directory / name).exists()

    def _node(self, name: str) -> DeviceNode:
        path = self._directory / name
        try:
            status = path.stat()
        except OSError as error:
            raise _unavailable(f"{path} cannot be given to a sandbox: {error.strerror}") from error
        if not stat.S_ISCHR(status.st_mode):
            raise _unavailable(f"{path} cannot be given to a sandbox: it is no character device")
        return DeviceNode(name, os.major(status.st_rdev), os.minor(status.st_rdev))


def gpu_devices_of(config: SandboxdConfig, gpus: Callable[[], Iterable[Gpu]]) -> GpuDevices:
    """Return the GPUs of a node as its settings say where they are."""
    directory, pipes = Path(config.gpu_device_directory), Path(config.gpu_mps_directory)
    return GpuDevices(directory, pipes, config.gpu_devices, gpus)


def _unavailable(message: str) -> DsecError:
    return DsecError(ErrorCode.UNAVAILABLE, message, retryable=True, details={"reason": "gpu"})
