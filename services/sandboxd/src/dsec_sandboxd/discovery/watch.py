"""Looking after the GPUs while the daemon runs, off its event loop: a card that hangs may wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec
import structlog

from dsec_common.clock import Clock
from dsec_common.errors import DsecError
from dsec_common.nodes_file import NodeEntry
from dsec_sandboxd.discovery.claims import GpuClaims
from dsec_sandboxd.discovery.gpus import GpuReader, GpuSample
from dsec_sandboxd.discovery.mps import mps_runs
from dsec_sandboxd.discovery.nvml import open_nvml

_log: Final = structlog.get_logger(__name__)

#: A reading that takes longer is a card that hangs; its node's others are told of all the same.
PATIENCE_S: Final = 10.0


class GpuWatch:
    """What is known of the GPUs now. On a machine without any nothing runs."""

    def __init__(self, node: str) -> None:
        """Take the node's name, for others on the same machine."""
        self._claims = GpuClaims(node)
        self._reader: GpuReader | None = None
        self._flaw = ""
        self.sample = GpuSample()
        self.driver = ""

    async def open(self, entry: NodeEntry, mps_pipes: Path) -> None:
        """Find the GPUs, or the reason why there are none.

        Args:
            entry: what the operator says of this node.
            mps_pipes: the directory of the node's MPS daemon, where one runs.
        """
        await asyncio.to_thread(self._open, entry, mps_pipes)

    def _open(self, entry: NodeEntry, mps_pipes: Path) -> None:
        try:
            nvml = open_nvml()
        except DsecError as error:
            self._flaw = error.message
            return
        self._reader = GpuReader(
            nvml, entry, claim=self._claims.claim, mps_runs=lambda: mps_runs(mps_pipes)
        )
        self.driver = self._reader.driver
        self.sample = self._reader.read()

    @property
    def reason(self) -> str:
        """Why there are no GPUs, or not all that the machine has; empty when there are."""
        if self._reader is None:
            return self._flaw
        passed_over = "; ".join(sorted(self._reader.passed_over.values()))
        return passed_over or ("" if self.sample.gpus else "the NVIDIA driver knows no GPU")

    async def run(self, clock: Clock, interval_s: float) -> None:
        """Read again and again, until cancelled."""
        reader = self._reader
        if reader is None:
            return
        reading: asyncio.Task[GpuSample] | None = None
        while True:
            await clock.sleep(interval_s)
            if reading is None:
                reading = asyncio.create_task(asyncio.to_thread(reader.read))
            await asyncio.wait({reading}, timeout=PATIENCE_S)
            if not reading.done():
                self._take(self._hanging())
                continue
            self._take(reading.result())
            reading = None

    def _hanging(self) -> GpuSample:
        """Return the last reading with every card unhealthy: nobody knows which one it is."""
        reason = "the NVIDIA driver does not answer: look at its messages in dmesg"
        gpus = tuple(
            msgspec.structs.replace(gpu, healthy=False, reason=gpu.reason or reason)
            for gpu in self.sample.gpus
        )
        return GpuSample(gpus=gpus)

    def _take(self, sample: GpuSample) -> None:
        before, self.sample = self.sample, sample
        for gpu in sample.gpus:
            if not gpu.healthy and gpu not in before.gpus:
                _log.warning("gpu_unhealthy", uuid=gpu.uuid, index=gpu.index, reason=gpu.reason)

    def close(self) -> None:
        """Let go of the driver. Idempotent."""
        reader, self._reader = self._reader, None
        self._claims.close()
        if reader is not None:
            reader.close()
