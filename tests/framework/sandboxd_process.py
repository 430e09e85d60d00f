"""A node daemon as a process of its own, to be killed; around it what the node's tests need."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from dsec_common.testing.nats import nats_for_tests
from kernel_world import cgroups_left
from sandboxd_node import NODE, NodeForTests

START_TIMEOUT_S = 30.0


class DaemonProcess:
    """One node's daemon, started and ended as often as a test likes.

    Args:
        node: whose.
        environment: what it has in its environment beside the test's own.
        settings: what it is told at each start beside the node's own.
    """

    def __init__(
        self,
        node: NodeForTests,
        environment: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.node = node
        self._environment = dict(environment or {})
        self._settings = dict(settings or {})
        self._process: asyncio.subprocess.Process | None = None
        self._runtime_file = node.directory / "runtime.json"
        self.log = node.directory / "daemon.log"

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self._process is not None
        return self._process.pid

    def spawner_pid(self) -> int:
        """Return the process id of its spawner."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in children:
            if Path(f"/proc/{child}/comm").read_text() == "dsec-spawner\n":
                return int(child)
        raise AssertionError("the daemon has no spawner")

    async def start(self, *, wait: bool = True, **settings: Any) -> None:
        """Start the daemon; on return it answers."""
        config = self.node.config
        self._runtime_file.unlink(missing_ok=True)
        flags: dict[str, Any] = {
            "nats-servers": config.nats_servers[0],
            "nats-credentials": config.nats_credentials,
            "node": config.node,
            "layers-directory": config.layers_directory,
            "run-directory": config.run_directory,
            "state-directory": config.state_directory,
            "drain-timeout-s": config.drain_timeout_s,
            "heartbeat-interval-s": config.heartbeat_interval_s,
            "kafka-bootstrap": config.kafka_bootstrap,
            "network-uplink": config.network_uplink,
            "runtime-file": self._runtime_file,
            **{
                name.replace("_", "-"): value
                for name, value in {**self._settings, **settings}.items()
            },
        }
        arguments = [f"--{name}={value}" for name, value in flags.items() if value != ""]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dsec_sandboxd", *arguments),
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
            )
        if wait:
            await self.running()

    async def running(self) -> None:
        """Return when the daemon says that it runs."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    if json.loads(self._runtime_file.read_text())["state"] == "running":
                        return
                assert self._process is not None
                assert self._process.returncode is None, self.log.read_text()[-4000:]
                await asyncio.sleep(0.01)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        code = await self._process.wait()
        self._process = None
        return code

    async def kill(self) -> None:
        """End it as the kernel would."""
        assert await self.end(signal.SIGKILL) == -signal.SIGKILL

    async def died(self) -> None:
        """Return when it has been killed, by whomever."""
        assert self._process is not None
        assert await self._process.wait() == -signal.SIGKILL
        self._process = None

    async def finish(self) -> None:
        """Leave nothing: start it once more if it was killed, and stop it orderly."""
        if self._process is None:
            await self.start()
        assert await self.end(signal.SIGTERM) == 0, self.log.read_text()[-4000:]


@contextlib.asynccontextmanager
async def daemon_for_tests(
    directory: Path,
    layers: Path,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[DaemonProcess, NodeForTests]]:
    """Yield a node whose daemon is a process that runs; afterwards nothing of it is left.

    Args:
        directory: of the node.
        layers: its layer store.
        environment: as :class:`DaemonProcess` takes it.
        flags: as :class:`DaemonProcess` takes its settings.
        settings: what the node's own settings are instead.
    """
    async with contextlib.AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_for_tests(projects=("other",)))
        node = NodeForTests(nats, directory, layers, **settings)
        node.scheduler = await stack.enter_async_context(nats.service("scheduler"))
        node.project = await stack.enter_async_context(nats.project("default"))
        node.other = await stack.enter_async_context(nats.project("other"))
        await node.listen()
        daemon = DaemonProcess(node, environment, flags)
        await daemon.start()
        try:
            yield daemon, node
        finally:
            await daemon.finish()
            assert left_of_node(directory) == []


def left_of_node(directory: Path) -> list[str]:
    """Return what is left of the node that was stopped: cgroups, mounts, processes."""
    left = cgroups_left(NODE)
    left += [
        line
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(directory) in line
    ]
    listing = subprocess.run(
        ["ps", "-eo", "pid,args"], check=True, capture_output=True, text=True
    ).stdout
    left += [line for line in listing.splitlines() if f"--node={NODE}" in line]
    return left


def processes_of(local: str) -> list[int]:
    """Return the host's numbers of a sandbox's processes; the first is its PID 1."""
    for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        directory = root / f"dsec-{NODE}" / local
        if directory.is_dir():
            found = []
            for listing in [directory / "cgroup.procs", *directory.glob("*/cgroup.procs")]:
                found += [int(line) for line in listing.read_text().split()]
            return found
    return []


def kill_process(pid: int) -> None:
    """End one process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
