"""All that heartbeats tell of the machine itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

import msgspec

from dsec_common.clock import Clock
from dsec_common.nodes_file import read_nodes_file
from dsec_common.wire.node import Machine
from dsec_sandboxd.config import SandboxdConfig
from dsec_sandboxd.discovery.gpus import GpuSample
from dsec_sandboxd.discovery.machine import disk_bytes, read_machine
from dsec_sandboxd.discovery.watch import GpuWatch, Observer


class Equipment:
    """What this machine has: read whole at the start, its GPUs ever after."""

    def __init__(self, config: SandboxdConfig) -> None:
        """Take which node this is, and how often to look."""
        self._config = config
        self._gpus = GpuWatch(config.node_name, config.gpu_patience_s)
        self.machine = Machine()

    async def __aenter__(self) -> Self:
        """Look at everything once.

        Raises:
            DsecError: ``invalid``: ``nodes.yaml`` makes no sense.
        """
        entry = read_nodes_file(self._config.nodes_file).entry(self._config.node_name)
        await self._gpus.open(entry, Path(self._config.gpu_mps_directory))
        machine = await asyncio.to_thread(read_machine, self._config.state_path)
        self.machine = msgspec.structs.replace(machine, driver=self._gpus.driver)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let go of the GPU driver."""
        self._gpus.close()

    async def watch(self, clock: Clock, observer: Observer) -> None:
        """Read the GPUs again and again, until cancelled."""
        await self._gpus.run(clock, self._config.gpu_interval_s, observer)

    @property
    def sample(self) -> GpuSample:
        """The last reading of the GPUs."""
        return self._gpus.sample

    @property
    def missing(self) -> dict[str, str]:
        """The reason why there are no GPUs, or not all of the machine's, under ``gpu``."""
        reason = self._gpus.reason
        return {"gpu": reason} if reason else {}

    @property
    def disk_bytes_available(self) -> int:
        """What is free of the disk now."""
        return disk_bytes(self._config.state_path)[1]
