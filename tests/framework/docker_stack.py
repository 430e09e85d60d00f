"""The services of ``compose.yaml`` as containers, against a NATS and a Kafka of this machine.

They share the machine's network, so each gets a port of its own and the addresses of ours. NATS
runs with the configuration, and all with the credentials, that the file's own ``auth`` writes.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from docker_compose import SERVICES, health_command, read_compose, run_options
from docker_engine import DockerEngine
from dsec.client import DSecClient
from dsec_common import health
from dsec_common.embedded.kafka import KafkaProvider, open_kafka
from dsec_common.embedded.nats import find_nats_server
from dsec_common.embedded.process import Child, free_port

IMAGE: Final = "dsec"
_HEALTHY_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1


class ContainerStack:
    """Everything of the file but its own NATS and Kafka.

    Args:
        engine: a running one.
        directory: for the servers' data.
        scale: how many containers of a service, if not one.
    """

    def __init__(self, engine: DockerEngine, directory: Path, scale: dict[str, int]) -> None:
        self.engine = engine
        self.node = f"compose-{os.getpid()}"
        self.compose = read_compose(node=self.node)
        self.ports = {
            f"{name}-{number}": free_port()
            for name in SERVICES
            for number in range(1, scale.get(name, 1) + 1)
        }
        self._directory = directory
        self._nats_port, self._monitor_port = free_port(), free_port()
        self._nats: Child | None = None
        self._kafka: KafkaProvider = open_kafka("embedded", directory / "kafka")

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- Life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything and return when every container is healthy."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self.auth_init()
        await self._start_nats()
        await self._kafka.start()
        for name in self.ports:
            self._run_service(name)
        for name in self.ports:
            await self.wait_healthy(name)

    async def stop(self) -> None:
        """Stop the containers in order and remove them with their volumes, then the servers."""
        running = self.engine.docker("ps", "--quiet").split()
        if running:
            self.engine.docker("stop", *running)
        self.engine.remove_all()
        await self._kafka.stop()
        nats, self._nats = self._nats, None
        if nats is not None:
            await nats.stop(10.0)

    def auth_init(self) -> dict[str, Any]:
        """Run the file's ``auth`` as it is, but for where our NATS listens; return what it says."""
        extra = [
            f"--nats-listen=127.0.0.1:{self._nats_port}",
            f"--nats-monitor=127.0.0.1:{self._monitor_port}",
            f"--nats-data={self._directory / 'nats'}",
        ]
        service = self.compose["services"]["auth"]
        said = self.run_once("auth", *service["command"], *extra, "--json")
        document: dict[str, Any] = json.loads(said)
        return document

    def run_once(self, name: str, *command: str) -> str:
        """Run a command in the place of a service, as ``docker compose run --rm`` does."""
        options = run_options(self.compose["services"][name], {"DSEC_NATS_SERVERS": self.nats_url})
        return self.engine.docker("run", "--rm", "--network=host", *options, IMAGE, *command)

    async def _start_nats(self) -> None:
        config = self.engine.volume("config") / "nats.conf"
        self._nats = Child.start(
            [find_nats_server(), "--config", str(config)],
            log_file=self._directory / "nats.log",
            cwd=self._directory,
        )
        monitor = f"http://127.0.0.1:{self._monitor_port}/healthz"
        deadline = time.monotonic() + _HEALTHY_TIMEOUT_S
        while health.main([monitor]) != 0:
            assert self._nats.exit_status() is None, self._nats.last_lines()
            assert time.monotonic() < deadline, self._nats.last_lines()
            await asyncio.sleep(_POLL_S)

    def _run_service(self, name: str) -> None:
        service = self.compose["services"][name.rpartition("-")[0]]
        environment = {
            "DSEC_NATS_SERVERS": self.nats_url,
            "DSEC_KAFKA_BOOTSTRAP": self._kafka.bootstrap_servers,
            "DSEC_HTTP_HOST": "127.0.0.1",
            "DSEC_HTTP_PORT": str(self.ports[name]),
        }
        options = run_options(service, environment)
        self.engine.docker(
            *("run", "--detach", f"--name={name}", "--network=host"),
            *(*options, IMAGE, *service["command"]),
        )

    # --- Use ----------------------------------------------------------------------------------

    @property
    def nats_url(self) -> str:
        """Where NATS listens."""
        return f"nats://127.0.0.1:{self._nats_port}"

    def client(self, project: str = "default") -> DSecClient:
        """Return a client of a project, not yet connected."""
        credentials = self.engine.volume("operator") / "projects" / f"{project}.creds"
        return DSecClient(self.nats_url, credentials, kafka_bootstrap=self._kafka.bootstrap_servers)

    async def wait_healthy(self, name: str) -> None:
        """Return when the file's own health check passes in a container."""
        service = self.compose["services"][name.rpartition("-")[0]]
        check = health_command(service, self.ports[name])
        deadline = time.monotonic() + _HEALTHY_TIMEOUT_S
        while True:
            asked = await asyncio.to_thread(self.engine.attempt, "exec", name, *check)
            if asked.returncode == 0:
                return
            state = self.engine.inspect(name)["State"]
            if not state["Running"] or time.monotonic() > deadline:
                logs = self.engine.attempt("logs", "--tail", "30", name)
                said = (asked.stderr + logs.stdout + logs.stderr).decode(errors="replace")
                message = f"{name} is not healthy: {state}\n{said}"
                raise AssertionError(message)
            await asyncio.sleep(_POLL_S)

    def leftovers(self) -> list[str]:
        """Return what of the node is still on this machine; call it after :meth:`stop`."""
        cgroups = Path("/sys/fs/cgroup").glob(f"**/*{self.node}*")
        return [
            *(f"cgroup {path}" for path in cgroups),
            *(f"process {line}" for line in _command_lines() if self.node in line),
            *(f"mount {line}" for line in _lines("/proc/self/mountinfo") if self.node in line),
            *(f"socket {line}" for line in _lines("/proc/net/unix") if self.node in line),
        ]


def _lines(path: str) -> list[str]:
    return Path(path).read_text(errors="replace").splitlines()


def _command_lines() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
