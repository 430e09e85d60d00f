"""This node's GPUs, read again and again: what lasts, and what changes all the time.

A card that was seen once is never forgotten while the daemon lives: one that falls off the bus
stays in the list, unhealthy, with the reason, until the driver answers for it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec_common.compute.model import CardMode
from dsec_common.nodes_file import NodeEntry
from dsec_common.wire.node import Gpu, GpuInstance, GpuReading
from dsec_sandboxd.discovery.links import islands, pcie_bytes_per_s
from dsec_sandboxd.discovery.nvml import DeviceLost, Nvml
from dsec_sandboxd.discovery.use import GpuProcess, UseReader

REOPEN_ROUNDS: Final = 30
"""While a card is lost the driver is asked to look for it anew once in so many readings."""

_SWITCH: Final = "nvswitch"
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of all cards.

    Attributes:
        processes: by card, or by MIG instance, who uses it; one whose processes the driver does not
            tell is not there. Users and busy times only where they were asked for.
    """

    gpus: tuple[Gpu, ...] = ()
    readings: tuple[GpuReading, ...] = ()
    processes: Mapping[str, tuple[GpuProcess, ...]] = {}


class GpuReader:
    """Reads the cards through the driver. Calls wait for cards: use it on a thread of its own."""

    def __init__(
        self,
        nvml: Nvml,
        entry: NodeEntry | None = None,
        *,
        claim: Callable[[str], str] = lambda _: "",
        mps_runs: Callable[[], bool] = lambda: False,
        pci_devices: Path = _PCI_DEVICES,
    ) -> None:
        """Take the library, what the operator says of this node, and what is around.

        Args:
            nvml: the driver's library, open.
            entry: this node's part of ``nodes.yaml``.
            claim: takes a card for this node; returns who has it already, empty for nobody.
            mps_runs: whether CUDA's MPS runs.
            pci_devices: the kernel's directory of them.
        """
        self._nvml = nvml
        self._use = UseReader(nvml)
        self._entry = entry or NodeEntry()
        self._claim = claim
        self._mps_runs = mps_runs
        self.passed_over: dict[str, str] = {}
        """Why a card of this machine is not this node's, by uuid."""
        self._pci_devices = pci_devices
        self._known: dict[str, Gpu] = {}
        self._peers: dict[str, frozenset[str]] = {}
        self._handles: dict[int, Any] = {}
        self._uuids: dict[int, str] = {}
        self._buses: dict[str, str] = {}
        self._instances: dict[str, dict[str, Any]] = {}
        """The handles of a card's MIG instances, each by its uuid."""
        self._until_reopening = REOPEN_ROUNDS

    @property
    def driver(self) -> str:
        """The driver's version; empty when it does not tell."""
        try:
            return self._nvml.ask_or("", "nvmlSystemGetDriverVersion")
        except DeviceLost:
            return ""

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.close()

    def read(self, *, measure_use: bool = False) -> GpuSample:
        """Return all cards that were ever seen, and what is known of them now.

        Args:
            measure_use: look whose each process is, and how busy it kept its card.
        """
        self._look_anew_for_lost_cards()
        lost = self._find_devices()
        readings: list[GpuReading] = []
        processes: dict[str, tuple[GpuProcess, ...]] = {}
        seen: set[str] = set()
        for index, handle in self._handles.items():
            uuid = self._uuids[index]
            if not self._is_ours(uuid, index):
                continue
            seen.add(uuid)
            try:
                self._known[uuid] = self._gpu(index, uuid, handle)
                running = self._processes(uuid, handle, measure_use=measure_use)
                users = {process.pid for each in running.values() for process in each}
                readings.append(self._reading(uuid, handle, len(users)))
                processes |= running
            except DeviceLost as error:
                self._known.setdefault(uuid, Gpu(uuid=uuid, model="", index=index))
                lost[uuid] = f"it fell off the bus or hangs ({error}): reset it or restart the node"
        for uuid in self._known.keys() - seen:
            lost.setdefault(uuid, "the driver does not list it any more: restart the node")
        for uuid, reason in lost.items():
            gpu = self._known[uuid]
            self._known[uuid] = msgspec.structs.replace(gpu, healthy=False, reason=reason)
        return GpuSample(gpus=self._with_islands(), readings=tuple(readings), processes=processes)

    def _is_ours(self, uuid: str, index: int) -> bool:
        if self._entry.only and uuid not in self._entry.only:
            self.passed_over[uuid] = f"GPU {index} ({uuid}) is not under `only` in nodes.yaml"
        elif owner := self._claim(uuid):
            self.passed_over[uuid] = f"GPU {index} ({uuid}) is offered by {owner} on this machine"
        else:
            self.passed_over.pop(uuid, None)
        return uuid not in self.passed_over

    def _look_anew_for_lost_cards(self) -> None:
        if all(gpu.healthy for gpu in self._known.values()):
            self._until_reopening = REOPEN_ROUNDS
            return
        self._until_reopening -= 1
        if self._until_reopening == 0:
            self._until_reopening = REOPEN_ROUNDS
            self._handles.clear()
            try:
                self._nvml.reopen()
            except DeviceLost:
                return  # the cards cannot be listed then, either, and that has its reason

    def _find_devices(self) -> dict[str, str]:
        """Take handles of cards that have none; return the reasons of those that give none."""
        nvml, lost = self._nvml, {}
        try:
            count = nvml.ask("nvmlDeviceGetCount")
        except DeviceLost as error:
            self._handles.clear()
            return dict.fromkeys(self._known, f"the driver does not answer: {error}")
        for index in range(count):
            if index in self._handles:
                continue
            try:
                handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
                uuid = nvml.ask("nvmlDeviceGetUUID", handle)
                self._buses[nvml.ask("nvmlDeviceGetPciInfo", handle).busId.upper()] = uuid
            except DeviceLost as error:
                # Nobody knows which one it is, but that there is one must be told all the same.
                uuid = self._uuids.get(index, f"unknown-{index}")
                self._known.setdefault(uuid, Gpu(uuid=uuid, model="", index=index))
                lost[uuid] = f"it gives no handle ({error}): reset it or restart the node"
                continue
            self._handles[index], self._uuids[index] = handle, uuid
            self._known.pop(f"unknown-{index}", None)
        return lost

    def _with_islands(self) -> tuple[Gpu, ...]:
        gpus = sorted(self._known.values(), key=lambda gpu: (gpu.index, gpu.uuid))
        found = islands({gpu.uuid: gpu.index for gpu in gpus}, self._peers)
        return tuple(msgspec.structs.replace(gpu, island=found.get(gpu.uuid, "")) for gpu in gpus)

    def _gpu(self, index: int, uuid: str, handle: Any) -> Gpu:
        nvml = self._nvml
        self._peers[uuid] = frozenset(self._linked(handle))
        mode, instances, slices = self._division(uuid, handle)
        reason = self._flaw(handle)
        return Gpu(
            uuid=uuid,
            model=self._entry.model_of(uuid, nvml.ask("nvmlDeviceGetName", handle)),
            memory_bytes=nvml.ask("nvmlDeviceGetMemoryInfo", handle).total,
            index=index,
            pcie_bytes_per_s=pcie_bytes_per_s(
                nvml.ask_or(0, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
                nvml.ask_or(0, "nvmlDeviceGetMaxPcieLinkWidth", handle),
            ),
            numa_node=self._numa_node(handle),
            mode=mode,
            mig=instances,
            compute_slices=slices,
            healthy=not reason,
            reason=reason,
        )

    def _flaw(self, handle: Any) -> str:
        """Return why a card that answers must not be given work."""
        nvml = self._nvml
        prohibited = nvml.library.NVML_COMPUTEMODE_PROHIBITED
        if nvml.ask_or(0, "nvmlDeviceGetComputeMode", handle) == prohibited:
            return "its compute mode is prohibited: allow it with nvidia-smi -c DEFAULT"
        *_, failed = nvml.ask_or((0, 0, 0, 0), "nvmlDeviceGetRemappedRows", handle)
        return "its memory has failed, rows cannot be remapped: replace the card" if failed else ""

    def _reading(self, uuid: str, handle: Any, processes: int) -> GpuReading:
        nvml = self._nvml
        rates = nvml.ask_or(None, "nvmlDeviceGetUtilizationRates", handle)
        return GpuReading(
            uuid=uuid,
            utilisation=min(1.0, rates.gpu / 100) if rates else 0.0,
            memory_bytes_used=nvml.ask("nvmlDeviceGetMemoryInfo", handle).used,
            pcie_bytes_per_s=pcie_bytes_per_s(
                nvml.ask_or(0, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
                nvml.ask_or(0, "nvmlDeviceGetCurrPcieLinkWidth", handle),
            ),
            processes=processes,
        )

    def _processes(
        self, uuid: str, handle: Any, *, measure_use: bool
    ) -> dict[str, tuple[GpuProcess, ...]]:
        """Return who uses the card, or each of its instances."""
        use = self._use
        found: dict[str, tuple[GpuProcess, ...]] = {}
        for place, its_handle in (self._instances[uuid] or {uuid: handle}).items():
            listed = use.running(place, its_handle)
            if listed is not None:
                found[place] = (
                    use.measure(place, its_handle, listed) if measure_use else tuple(listed)
                )
        return found

    def _linked(self, handle: Any) -> Iterable[str]:
        """Yield what the card's active NVLinks lead to."""
        nvml = self._nvml
        for link in range(nvml.library.NVML_NVLINK_MAX_LINKS):
            state = nvml.ask_or(None, "nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                return  # links are numbered without gaps; this one is not there
            if not state:
                continue
            kind = nvml.ask_or(None, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            if kind == nvml.library.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                yield _SWITCH
                continue
            remote = nvml.ask_or(None, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            if remote is not None and (peer := self._buses.get(remote.busId.upper())):
                yield peer

    def _division(self, uuid: str, handle: Any) -> tuple[CardMode, tuple[GpuInstance, ...], int]:
        nvml = self._nvml
        handles = self._instances[uuid] = {}
        current, _ = nvml.ask_or([0, 0], "nvmlDeviceGetMigMode", handle)
        if not current:
            return (CardMode.MPS if self._mps_runs() else CardMode.WHOLE), (), 0
        instances: list[GpuInstance] = []
        for number in range(nvml.ask_or(0, "nvmlDeviceGetMaxMigDeviceCount", handle)):
            one = nvml.ask_or(None, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            if one is not None:
                instances.append(self._instance(one))
                handles[instances[-1].uuid] = one
        return CardMode.MIG, tuple(instances), self._slices_in_all(handle)

    def _instance(self, handle: Any) -> GpuInstance:
        nvml = self._nvml
        attributes = nvml.ask_or(None, "nvmlDeviceGetAttributes", handle)
        _, _, profile = nvml.ask_or("", "nvmlDeviceGetName", handle).partition("MIG ")
        return GpuInstance(
            uuid=nvml.ask("nvmlDeviceGetUUID", handle),
            profile=profile,
            memory_bytes=nvml.ask("nvmlDeviceGetMemoryInfo", handle).total,
            compute_slices=attributes.computeInstanceSliceCount if attributes else 0,
        )

    def _slices_in_all(self, handle: Any) -> int:
        """Return into how many parts the card is cut: its largest profile has them all."""
        nvml = self._nvml
        for profile in (
            nvml.library.NVML_GPU_INSTANCE_PROFILE_8_SLICE,
            nvml.library.NVML_GPU_INSTANCE_PROFILE_7_SLICE,
            nvml.library.NVML_GPU_INSTANCE_PROFILE_4_SLICE,
        ):
            # The second version of the question is not known to drivers before 470.
            found = nvml.ask_or(None, "nvmlDeviceGetGpuInstanceProfileInfo", handle, profile, 1)
            if found is not None:
                return int(found.sliceCount)
        return 0

    def _numa_node(self, handle: Any) -> int:
        bus = self._nvml.ask("nvmlDeviceGetPciInfo", handle).busId.lower()
        domain, _, rest = bus.partition(":")
        try:
            text = (self._pci_devices / f"{domain[-4:]}:{rest}" / "numa_node").read_text()
            return int(text)
        except (OSError, ValueError):
            return -1
